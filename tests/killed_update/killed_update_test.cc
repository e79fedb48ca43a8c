// SPDX-License-Identifier: Apache-2.0
// A process is killed between any two instructions of an update; another one finishes it, with the bits of an update that
// nobody disturbed. LOCKSTEP_KILL_ROUNDS: random kills of each case (default 2).
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <span>

#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/memory/arena.h"
#include "lockstep/collective/shm/memory/segment.h"
#include "lockstep/collective/transport/cpu_transport.h"
#include "lockstep/collective/world/world_state.h"
#include "tests/defects.h"
#include "tests/killed_update/stepped_child.h"
#include "tests/killed_update/workload.h"
#include "tests/support.h"

namespace lockstep::testing {
namespace {

constexpr size_t kMostText = size_t{64} << 20;

// What the test and the ranks share beside the arenas.
struct Board {
  std::atomic<size_t> manifest_bytes, before_bytes, after_bytes;
  std::atomic<bool> updates;  // the last step has begun
  char manifest[1 << 20];
  char before[kMostText], after[kMostText];
};

class SharedBoard {
 public:
  SharedBoard()
      : board_(static_cast<Board*>(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board* operator->() const { return board_; }

 private:
  Board* board_;
};

void put(char* to, std::atomic<size_t>& bytes, const std::string& text) {
  std::memcpy(to, text.data(), text.size());
  bytes.store(text.size());
}

// How the last step is disturbed, by whom.
struct Plan {
  bool kept = true;
  int stepped_rank = -1;  // this rank's thread is stepped through the update
};

// A rank from the first step to the last.
void be_rank(std::shared_ptr<SharedMemory> memory, const UpdateCase& given, const Plan& plan, SharedBoard& board) {
  Workload work(std::move(memory), given, plan.kept);
  const bool first = work.memory().rank() == 0;
  for (int step = 1; step <= kSteps; ++step) {
    work.fill_gradients(step);
    const bool last = step == kSteps;
    if (last && first) {
      put(board->manifest, board->manifest_bytes, work.manifest());
      put(board->before, board->before_bytes, image_of(work.state()));
    }
    if (last && given.threads_at_last > 0) at::set_num_threads(given.threads_at_last);
    work.memory().barrier();
    if (last) board->updates = true;
    const bool steps = last && work.memory().rank() == plan.stepped_rank;
    if (steps) begin_steps();
    work.update(step);
    if (steps) stop_for_steps();
    work.memory().barrier();
  }
  while (plan.kept) ::pause();  // until it is killed: the memory is found while its ranks live
  if (first) put(board->after, board->after_bytes, image_of(work.state()));
  work.memory().barrier();
}

// All ranks in this process; returns when they are done. arena: of a rank that is alone.
void run_case(const UpdateCase& given, const Plan& plan, int arena, SharedBoard& board) {
  at::set_num_threads(
      given.threads);  // here: after a fork the first call makes libtorch's pool anew, and must be alone
  if (given.ranks == 1) {
    auto memory = std::make_shared<shm::Arena>(UniqueFd(::dup(arena)), "the memory of rank 0");
    return be_rank(SharedMemory::alone(std::move(memory)), given, plan, board);
  }
  auto groups =
      shm::make_thread_group(given.ranks, {.timeout = std::chrono::minutes(1), .share_ordinary_memory = false});
  run_threads(
      std::vector<int>(groups.size()),
      [&](int rank) { return std::make_unique<CpuTransport>(std::move(groups[static_cast<size_t>(rank)])); },
      [&](World& world) { be_rank(SharedMemory::of(world), given, plan, board); }, {});
}

// The state before the last step and after it, from an update that nobody disturbed and that keeps no journal.
struct Expected {
  std::string before, after;
};
Expected undisturbed(const UpdateCase& given) {
  SharedBoard board;
  const UniqueFd arena = shm::make_segment("the memory of rank 0", 0);
  const pid_t child = ::fork();
  if (child == 0) be_child([&] { run_case(given, {.kept = false}, arena.get(), board); });
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return {{board->before, board->before_bytes}, {board->after, board->after_bytes}};
}

// "": what is found in the arenas, once finished, is the state before the last step or, if that has begun, after it.
std::string difference(const SharedBoard& board, const InterruptedUpdate::Find& find, const Expected& expected) {
  InterruptedUpdate kept({board->manifest, board->manifest_bytes}, find);
  const auto record = UpdateJournal(kept.journal, kept.shape).newest();
  if (!record) return "no record of any step";
  const bool begun = record->step == kSteps;
  FlatUpdate::finish(SharedMemory::alone(), kept);
  const std::string image = image_of(kept.state);
  const std::string& right = begun ? expected.after : expected.before;
  if (image == right) return "";
  const auto first = std::mismatch(image.begin(), image.end(), right.begin(), right.end()).first - image.begin();
  return "the bits differ from byte " + std::to_string(first) + " of " + std::to_string(right.size()) +
         (begun ? " after" : " before") + " the step";
}

struct Found {
  size_t instructions = 0, states = 0;
  std::string difference;
};

// Bytes at the start of the arena that are in use, with some to spare.
size_t used_bytes(std::span<const std::byte> arena) {
  size_t used = arena.size();
  while (used > 0 && arena[used - 1] == std::byte{0}) --used;
  return std::min(arena.size(), used + 8192);
}

// Steps the child to the end, and looks at the memory whenever it has changed: that is what a kill at this instruction leaves
// behind. look() is given a copy of the memory; "" if it is right.
Found step_through(SteppedChild& child, std::span<std::byte> arena,
                   const std::function<std::string(std::span<std::byte> copy)>& look) {
  const size_t used = used_bytes(arena);
  std::vector<std::byte> last, copy;
  Found found;
  do {
    if (!last.empty() && std::memcmp(last.data(), arena.data(), used) == 0) continue;
    last.assign(arena.begin(), arena.begin() + static_cast<ptrdiff_t>(used));
    copy.assign(arena.begin(), arena.end());
    ++found.states;
    found.difference = look(copy);
  } while (found.difference.empty() && child.step() && ++found.instructions > 0);
  if (!found.difference.empty()) found.difference += ", instruction " + std::to_string(found.instructions);
  return found;
}

InterruptedUpdate::Find in_arena(std::span<std::byte> arena) {
  return [arena](const auto& place, size_t bytes) { return arena.subspan(place.offset, bytes).data(); };
}

// A rank, which is alone, and its memory.
struct Alone {
  explicit Alone(const UpdateCase& given)
      : child([this, given] { run_case(given, {.stepped_rank = 0}, files[0].get(), board); }) {
    child.wait_for_begin();
    arenas.emplace(files);
  }

  static std::vector<UniqueFd> one_file() {
    std::vector<UniqueFd> one;
    one.push_back(shm::make_segment("the memory of rank 0", 0));
    return one;
  }

  SharedBoard board;
  std::vector<UniqueFd> files = one_file();
  SteppedChild child;
  std::optional<Arenas> arenas;
};

Found kill_everywhere(const UpdateCase& given, const Expected& expected) {
  Alone rank(given);
  return step_through(rank.child, rank.arenas->of(0),
                      [&](auto copy) { return difference(rank.board, in_arena(copy), expected); });
}

// Steps the child through its first chunk, and looks at what a kill leaves behind whenever a run inside of it is in place, and
// the next is not.
struct FoundInside {
  std::vector<int64_t> elements;  // in place, each time
  std::string difference;         // the first
};
FoundInside kill_inside_of_a_chunk(const UpdateCase& given, const Expected& expected) {
  Alone rank(given);
  const std::span<std::byte> arena = rank.arenas->of(0);
  const InterruptedUpdate kept({rank.board->manifest, rank.board->manifest_bytes}, in_arena(arena));
  const UpdateJournal journal(kept.journal, kept.shape);
  FoundInside found{.elements = {0}};
  for (int64_t done = 0; done < given.sizes.front() && found.difference.empty() && rank.child.step();) {
    done = journal.mark(0).elements_in(kSteps, ChunkPhase::kUpdated);
    if (done == found.elements.back() || done >= given.sizes.front()) continue;
    found.elements.push_back(done);
    std::vector<std::byte> copy(arena.begin(), arena.end());
    found.difference = difference(rank.board, in_arena(copy), expected);
  }
  return found;
}

const SGDOptions kSgd{.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 1e-3};
const AdamWOptions kAdamW{.lr = 0.01};
const LAMBOptions kLamb{.lr = 0.01};
const LARSOptions kLars{.lr = 0.5, .trust = 0.02};

std::vector<UpdateCase> kinds() {
  return {{.name = "sgd", .options = kSgd},
          {.name = "plain_sgd_in_float64", .options = SGDOptions{.lr = 0.1}, .dtype = torch::kFloat64},
          {.name = "adam_clipped_by_value", .options = AdamOptions{.lr = 0.01}, .clipping = {.max_value = 0.05}},
          {.name = "adamw_with_average", .options = kAdamW, .ema_decay = 0.9},
          {.name = "sgd_whose_second_group_has_no_momentum", .options = kSgd, .group_without = 1},
          {.name = "sgd_whose_first_group_has_no_momentum", .options = kSgd, .group_without = 0},
          {.name = "sgd_clipped", .options = kSgd, .clipping = {.max_norm = 0.5}},
          {.name = "adamw_in_bfloat16", .options = kAdamW, .dtype = torch::kBFloat16, .ema_decay = 0.9},
          {.name = "sgd_in_float16_with_loss_scale",
           .options = kSgd,
           .dtype = torch::kFloat16,
           .clipping = {.max_norm = 0.5},
           .loss_scale = 128},
          {.name = "skipped_for_an_overflow", .options = kAdamW, .loss_scale = 128, .overflows = true},
          {.name = "lamb", .options = kLamb},
          {.name = "lars", .options = kLars},
          {.name = "rmsprop_whose_second_group_has_no_momentum",
           .options = RMSpropOptions{.lr = 0.01, .momentum = 0.9},
           .group_without = 1},
          {.name = "adagrad", .options = AdagradOptions{.lr = 0.1}},
          {.name = "lamb_with_all",
           .options = kLamb,
           .dtype = torch::kBFloat16,
           .clipping = {.max_norm = 0.5},
           .loss_scale = 64,
           .ema_decay = 0.9}};
}

// Small enough to look at every instruction.
std::vector<UpdateCase> small_cases() {
  auto cases = kinds();
  for (UpdateCase& each : cases) each.sizes = {5, 43, 1};
  return cases;
}

std::string name_of_case(const auto& info) { return info.param.name; }

#ifdef LOCKSTEP_DEFECTS

TEST(KilledUpdate, finds_a_key_that_comes_before_the_redo_copy) {
  const UpdateCase given = small_cases().front();
  const Expected expected = undisturbed(given);
  EXPECT_EQ(kill_everywhere(given, expected).difference, "");
  present_defect() = "the key comes before the redo copy";
  EXPECT_NE(kill_everywhere(given, expected).difference, "");
  present_defect() = "";
}

TEST(KilledUpdate, finds_a_chunk_that_is_begun_again) {
  UpdateCase given = small_cases().front();
  given.sizes = {4096, 5};
  const Expected expected = undisturbed(given);
  present_defect() = "a chunk is begun again";
  EXPECT_NE(kill_inside_of_a_chunk(given, expected).difference, "");
  present_defect() = "";
}

#else

// Kills the rank at an instruction, and whoever finishes its update at every one.
Found kill_who_finishes(const UpdateCase& given, size_t instruction, const Expected& expected) {
  Alone rank(given);
  for (size_t i = 0; i < instruction && rank.child.step(); ++i) {
  }
  rank.child.kill();
  const std::span<std::byte> arena = rank.arenas->of(0);
  SteppedChild second([&] {
    InterruptedUpdate kept({rank.board->manifest, rank.board->manifest_bytes}, in_arena(arena));
    begin_steps();
    FlatUpdate::finish(SharedMemory::alone(), kept);
    stop_for_steps();
  });
  second.wait_for_begin();
  return step_through(second, arena, [&](auto copy) { return difference(rank.board, in_arena(copy), expected); });
}

// As difference(), with so many ranks that finish together. They are threads of a child: this process forks.
std::string difference_of_several(int finishers, const SharedBoard& board, const InterruptedUpdate::Find& find,
                                  const Expected& expected) {
  SharedBoard result;
  const pid_t child = ::fork();
  if (child == 0)
    be_child([&] {
      at::set_num_threads(1);  // see run_case()
      auto groups =
          shm::make_thread_group(finishers, {.timeout = std::chrono::minutes(1), .share_ordinary_memory = false});
      run_threads(
          std::vector<int>(groups.size()),
          [&](int rank) { return std::make_unique<CpuTransport>(std::move(groups[static_cast<size_t>(rank)])); },
          [&](World& world) {
            InterruptedUpdate kept({board->manifest, board->manifest_bytes}, find);
            FlatUpdate::finish(SharedMemory::of(world), kept);
            if (world.rank() == 0) put(result->after, result->after_bytes, image_of(kept.state));
          },
          {});
    });
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status != 0) return "those who finish it failed";
  const std::string image(result->after, result->after_bytes);
  if (image != expected.before && image != expected.after) return "the bits are those of no step";
  return difference(board, find, expected);  // all is done
}

// Kills the process with all ranks after `instructions` of rank `victim`, or, without a victim, after that many nanoseconds.
// Returns the instructions that there were.
size_t kill_once(const UpdateCase& given, int victim, size_t when, const Expected& expected,
                 std::string& difference_found, int finishers = 1) {
  SharedBoard board;
  std::vector<UniqueFd> files;
  if (given.ranks == 1) files.push_back(shm::make_segment("the memory of rank 0", 0));
  SteppedChild child([&] { run_case(given, {.stepped_rank = victim}, given.ranks == 1 ? files[0].get() : -1, board); });
  size_t steps = 0;
  if (victim >= 0)
    child.wait_for_begin();
  else
    while (!board->updates) ::sched_yield();
  if (given.ranks > 1) files = arenas_of(child.pid(), given.ranks);
  if (victim >= 0)
    while (steps < when && child.step()) ++steps;
  else
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(when);
         std::chrono::steady_clock::now() < end;) {
    }
  child.kill();
  const Arenas arenas(files);
  const auto find = [&](const auto& place, size_t bytes) { return arenas.find(place, bytes); };
  difference_found =
      finishers == 1 ? difference(board, find, expected) : difference_of_several(finishers, board, find, expected);
  return steps;
}

// Several chunks, ranks and threads.
std::vector<UpdateCase> large_cases() {
  std::vector<UpdateCase> cases;
  for (const auto& [ranks, threads] : {std::pair{1, 1}, {1, 2}, {2, 1}, {3, 1}, {2, 2}})
    for (UpdateCase each : kinds()) {
      each.ranks = ranks;
      each.threads = threads;
      each.sizes = {9000, 70, 45000, 20};
      each.name += "_" + std::to_string(ranks) + "_ranks_" + std::to_string(threads) + "_threads";
      cases.push_back(each);
    }
  return cases;
}

class KilledUpdateOf : public ::testing::TestWithParam<UpdateCase> {};
INSTANTIATE_TEST_SUITE_P(Kinds, KilledUpdateOf, ::testing::ValuesIn(small_cases()),
                         [](const auto& info) { return name_of_case(info); });

TEST_P(KilledUpdateOf, is_finished_from_every_instruction) {
  const Expected expected = undisturbed(GetParam());
  EXPECT_EQ(expected.before == expected.after, GetParam().overflows);
  const Found found = kill_everywhere(GetParam(), expected);
  EXPECT_EQ(found.difference, "");
  EXPECT_GT(found.states, 10u);
  RecordProperty("instructions", static_cast<int>(found.instructions));
  RecordProperty("states", static_cast<int>(found.states));
  std::printf("  %zu instructions, %zu states of the memory\n", found.instructions, found.states);
}

TEST_P(KilledUpdateOf, is_finished_even_if_those_who_finish_it_are_killed) {
  const Expected expected = undisturbed(GetParam());
  std::minstd_rand random(7);
  const auto most = static_cast<size_t>(kill_everywhere(GetParam(), expected).instructions);
  for (int round = 0; round < rounds("LOCKSTEP_KILL_ROUNDS", 2); ++round) {
    const size_t at = std::uniform_int_distribution<size_t>(0, most)(random);
    EXPECT_EQ(kill_who_finishes(GetParam(), at, expected).difference, "") << "first killed at instruction " << at;
  }
}

// Of one pass and of several, with little and much state.
std::vector<UpdateCase> few_kinds() {
  const std::set<std::string> names = {"adamw_with_average", "sgd_clipped", "sgd_whose_second_group_has_no_momentum",
                                       "lamb_with_all"};
  auto few = kinds();
  std::erase_if(few, [&](const UpdateCase& each) { return !names.contains(each.name); });
  return few;
}

TEST(KilledUpdate, is_finished_inside_of_a_chunk) {
  for (UpdateCase given : few_kinds()) {
    given.sizes = {4096, 5};
    const FoundInside found = kill_inside_of_a_chunk(given, undisturbed(given));
    EXPECT_EQ(found.difference, "") << given.name << ", after " << found.elements.back() << " elements";
    EXPECT_EQ(found.elements, (std::vector<int64_t>{0, 1024, 2048, 3072})) << given.name;
  }
}

class KilledRanks : public ::testing::TestWithParam<UpdateCase> {};
INSTANTIATE_TEST_SUITE_P(Kinds, KilledRanks, ::testing::ValuesIn(large_cases()),
                         [](const auto& info) { return name_of_case(info); });

TEST_P(KilledRanks, are_replaced_wherever_they_were) {
  const UpdateCase& given = GetParam();
  const Expected expected = undisturbed(given);
  std::minstd_rand random(static_cast<unsigned>(std::hash<std::string>()(given.name)));
  const auto any = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below)(random); };
  std::string difference_found;
  size_t most = 20000;
  for (int round = 0; round < rounds("LOCKSTEP_KILL_ROUNDS", 2); ++round) {
    const int victim = round % 2 == 0 ? static_cast<int>(any(static_cast<size_t>(given.ranks) - 1)) : -1;
    const size_t when = victim >= 0 ? any(most) : any(2000000);
    const size_t steps = kill_once(given, victim, when, expected, difference_found);
    if (victim >= 0 && steps == when) most = std::min<size_t>(2 * most, 200000);
    ASSERT_EQ(difference_found, "") << "round " << round << ", rank " << victim << " after " << when;
  }
}

// Fewer, as many and more than there were.
TEST(KilledUpdate, is_finished_by_several_together) {
  std::minstd_rand random(11);
  for (UpdateCase given : few_kinds())
    for (const int finishers : {2, 3, 4}) {
      given.sizes = {9000, 70, 45000, 20};
      given.ranks = 3;
      const Expected expected = undisturbed(given);
      std::string difference_found;
      const size_t when = std::uniform_int_distribution<size_t>(0, 30000)(random);
      kill_once(given, given.ranks - 1, when, expected, difference_found, finishers);
      ASSERT_EQ(difference_found, "") << given.name << ", " << finishers << " finish, one was killed after " << when;
    }
}

TEST(KilledUpdate, is_finished_if_there_are_more_threads_than_before) {
  for (UpdateCase given : few_kinds())
    for (const int ranks : {1, 2}) {
      given.sizes = {9000, 70, 90000, 20};
      given.ranks = ranks;
      given.threads_at_last = 2;
      const Expected expected = undisturbed(given);
      std::string difference_found;
      for (const size_t when : {1000, 20000}) {
        kill_once(given, ranks - 1, when, expected, difference_found);
        ASSERT_EQ(difference_found, "") << given.name << ", " << ranks << " ranks, after " << when;
      }
    }
}

#endif

}  // namespace
}  // namespace lockstep::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);  // this process forks: it must have no threads
  return RUN_ALL_TESTS();
}
