// cpu/parallel.h: every task once, any number of workers, and tasks that wait for earlier ones.
#include "cpu/parallel.h"

#include "expect.h"

using namespace flash::cpu;

namespace {

void test_every_task_once() {
  for (int workers : {1, 2, 3, 16})
    for (int64_t tasks : {0, 1, 2, 100, 5000}) {
      std::vector<std::atomic<int>> done(tasks);
      std::atomic<int> bad_worker = 0;
      parallel_for(tasks, workers, [&](int64_t task, int worker) {
        done[task]++;
        if (worker < 0 || worker >= workers) bad_worker++;
      });
      for (int64_t task = 0; task < tasks; task++)
        EXPECT(done[task] == 1, "task ", task, " of ", tasks, ": ", done[task]);
      EXPECT(bad_worker == 0, workers, " workers");
    }
}

void test_tasks_may_wait_for_earlier_ones() {
  std::atomic<int64_t> turn = 0;
  std::vector<int64_t> order;
  parallel_for(300, 8, [&](int64_t task, int) {
    for (int64_t now = turn; now != task; now = turn) turn.wait(now);
    order.push_back(task);
    turn++;
    turn.notify_all();
  });
  for (int64_t i = 0; i < 300; i++) EXPECT(order[i] == i, "place ", i, ": ", order[i]);
}

}  // namespace

int main() {
  test_every_task_once();
  test_tasks_may_wait_for_earlier_ones();
  return flash::test::finish("parallel");
}
