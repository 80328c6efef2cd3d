// The stream of blocks between the producer and the consumer warpgroups of the sm_90 forward, played through: nobody
// may wait for ever, whatever warpgroups pass over. The orders of operations are those of fwd_producer.cuh and
// fwd_consumer.cuh.
#include <vector>

#include "expect.h"
#include "instances.h"
#include "sm90/fwd_tile.h"
#include "sm90/tile_order.h"

using namespace flash;
using namespace flash::sm90;

namespace {

// A wait is for the buffer at hand, which is the one after those that were freed.
enum class Op { kWaitQ, kFreeQ, kWaitK, kFreeK, kWaitV, kFreeV, kTurn };
enum class Load { kQ, kK, kV };

struct Stream {
  FwdTile tile;
  std::vector<Band> bands;  // one tile per entry: the tile's first row is 0 of its band
  std::vector<Load> loads;
  std::vector<std::vector<Op>> ops;  // of each warpgroup

  BlockRange all(int t) const { return tile_blocks(bands[t], 0, 64 * tile.warpgroups, tile.block_n); }
  BlockRange own(int t, int w) const {
    return warpgroup_blocks(bands[t], all(t), 64 * w, tile.block_n, {1, tile.kv_stages - 1});
  }

  void produce() {
    const int tiles = int(bands.size());
    loads = {Load::kK, Load::kQ};
    for (int t = 0; t < tiles; t++) {
      for (int n = all(t).count(); n > 1; n--) loads.insert(loads.end(), {Load::kK, Load::kV});
      if (t + 1 < tiles) loads.push_back(Load::kK);
      if (t + 1 < tiles && tile.q_stages > 1) loads.push_back(Load::kQ);
      loads.push_back(Load::kV);
      if (t + 1 < tiles && tile.q_stages == 1) loads.push_back(Load::kQ);
    }
  }

  void consume(int w) {
    std::vector<Op>& list = ops.emplace_back();
    const auto add = [&](std::initializer_list<Op> more) { list.insert(list.end(), more); };
    const auto pass_k = [&](int n) {
      while (n-- > 0) add({Op::kWaitK, Op::kFreeK, Op::kTurn});
    };
    const auto pass_v = [&](int n) {
      while (n-- > 0) add({Op::kWaitV, Op::kFreeV});
    };
    const auto open = [&](int t) {
      pass_k(all(t).end - own(t, w).end);
      add({Op::kWaitQ, Op::kWaitK});
    };
    open(0);
    add({Op::kTurn});
    for (int t = 0; t < int(bands.size()); t++) {
      const BlockRange mine = own(t, w), tiles = all(t);
      const bool idle = 64 * w >= bands[t].seqlen_q;
      add({Op::kFreeK});
      if (mine.count() == 1) add({Op::kFreeQ});
      pass_v(tiles.end - mine.end);
      for (int n = mine.count() - 1; n > 0; n--) {
        add({Op::kWaitK, Op::kWaitV, Op::kTurn, Op::kFreeK});
        if (n == 1) add({Op::kFreeQ});
        add({Op::kFreeV});
      }
      const int left = mine.begin - tiles.begin;
      if (idle) {
        pass_v(1);
        for (int i = 0; i < left; i++) {
          pass_k(1);
          pass_v(1);
        }
      } else {
        pass_k(left);
        add({Op::kWaitV});
      }
      if (t + 1 < int(bands.size())) {
        open(t + 1);
        add({Op::kTurn});
      }
      if (!idle) {
        add({Op::kFreeV});
        pass_v(left);
      }
    }
  }

  // Whether everybody gets to the end.
  bool play() const {
    const int groups = tile.warpgroups;
    int loaded[3] = {};
    std::vector<int> freed[3] = {std::vector<int>(groups), std::vector<int>(groups), std::vector<int>(groups)};
    std::vector<int> turns(groups);
    std::vector<size_t> at(groups);
    size_t load = 0;
    const int sizes[3] = {tile.q_stages, tile.kv_stages, tile.kv_stages};
    for (bool moved = true; moved;) {
      moved = false;
      while (load < loads.size()) {
        const int kind = int(loads[load]);
        bool room = true;  // Q buffers are per warpgroup, but loaded one after the other
        for (int w = 0; w < groups; w++) room = room && loaded[kind] - freed[kind][w] < sizes[kind];
        if (!room) break;
        loaded[kind]++;
        load++;
        moved = true;
      }
      for (int w = 0; w < groups; w++) {
        for (; at[w] < ops[w].size(); at[w]++, moved = true) {
          const Op op = ops[w][at[w]];
          if (op == Op::kTurn) {
            const int before = w == 0 ? turns[groups - 1] : turns[w - 1] - 1;
            if (tile.pingpong && turns[w] > before) break;
            turns[w]++;
          } else if (int(op) % 2 == 0) {
            if (loaded[int(op) / 2] <= freed[int(op) / 2][w]) break;
          } else {
            freed[int(op) / 2][w]++;
          }
        }
      }
    }
    bool done = load == loads.size();
    for (int w = 0; w < groups; w++)
      done = done && at[w] == ops[w].size() && freed[1][w] == loaded[1] && freed[2][w] == loaded[2];
    return done;
  }
};

void test_streams(const FwdTile& tile) {
  std::mt19937 random(1);
  const auto upto = [&](int n) { return int(random() % (n + 1)); };
  for (int round = 0; round < 400; round++) {
    Stream s;
    s.tile = tile;
    const int left = upto(2) == 0 ? -1 : upto(300), right = upto(2) == 0 ? -1 : upto(1) * upto(200);
    for (int t = 1 + upto(8); t > 0; t--)
      s.bands.push_back({1 + upto(64 * tile.warpgroups - 1), upto(3) == 0 ? upto(5) : upto(1000), left, right});
    s.produce();
    for (int w = 0; w < tile.warpgroups; w++) s.consume(w);
    EXPECT(s.play(), "warpgroups ", tile.warpgroups, ", block_n ", tile.block_n, ", kv_stages ", tile.kv_stages,
           ", window ", left, " ", right, ", round ", round);
  }
}

}  // namespace

int main() {
  for (const Key& key : kInstances)
    if (key.pass == Pass::kFwd && key.arch == Arch::kSm90)
      test_streams(fwd_tile(key.head_dim, key.head_dim_v, key.variant == Variant::kGeneral));
  return flash::test::finish("sm90 forward stream");
}
