// Threads for the CPU path: started and joined within one call, so that nothing is left running in a process that
// forks.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace flash::cpu {

// Calls body(task, worker) once for every task in [0, tasks), on `workers` threads of which the caller is worker 0.
// Tasks are handed out in ascending order: a task may wait for one with a smaller number, which is running or done.
// `body` must not throw: a waiting task would never be woken.
template <class Body>
void parallel_for(int64_t tasks, int workers, const Body& body) {
  std::atomic<int64_t> next = 0;
  const auto work = [&](int worker) noexcept {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker);
  };
  std::vector<std::thread> others;
  others.reserve(workers);
  try {
    for (int worker = 1; worker < workers; worker++) others.emplace_back(work, worker);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that exist do the work.
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace flash::cpu
