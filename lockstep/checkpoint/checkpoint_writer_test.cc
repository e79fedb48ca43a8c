// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint_writer.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoints.h"
#include "lockstep/deadline.h"
#include "tests/held_disk.h"
#include "tests/safetensors.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;
using testing::to_safetensors;

constexpr std::chrono::seconds kLong{60};

// A file of `bytes` whose values are all `step`.
TensorFile state_of(int step, int64_t bytes = 4096) {
  torch::Tensor values = torch::empty({bytes / 4});
  std::fill_n(values.data_ptr<float>(), values.numel(), static_cast<float>(step));  // no threads: children are forked
  return {.tensors = {{"flag", torch::tensor({true})}, {"values", values}}, .metadata = {{"step", concat(step)}}};
}

// The step of the newest checkpoint, which has to be whole; 0: none.
int newest_step(const TempFolder& folder) {
  const auto newest = CheckpointFolder(folder.path()).load_newest();
  if (!newest) return 0;
  int step = 0;
  EXPECT_TRUE(parse_int(newest->file.metadata().at("step").c_str(), step));
  EXPECT_TRUE(newest->file.read("values").eq(step).all().item<bool>());
  return step;
}

// A folder lies where its file should be.
void block_checkpoint(const TempFolder& folder, int step) {
  std::filesystem::create_directory(folder / concat("step-0000000", step, ".safetensors"));
}

bool comes_true(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(kLong);
  while (!condition())
    if (deadline.passed()) return false;
  return true;
}

TEST(StateCopy, is_written_as_what_was_copied) {
  const TensorFile file = {.tensors = {{"a", torch::arange(24, torch::kFloat32).reshape({4, 6}).t()},
                                       {"b", torch::tensor({true, false, true})},
                                       {"c", torch::arange(5, torch::kFloat64)},
                                       {"empty", torch::empty({0})}},
                           .metadata = {{"step", "3"}}};
  StateCopy copy;
  copy.copy(state_of(1, 1 << 16));  // larger: what it leaves must not matter
  EXPECT_EQ(to_safetensors(copy.copy(file)), to_safetensors(file));
}

TEST(CheckpointWriter, saves_the_state_at_the_time_of_the_call) {
  const TempFolder folder;
  TensorFile state = state_of(1, 8 << 20);
  {
    CheckpointWriter writer{CheckpointFolder(folder.path())};
    writer.save(1, state);
    state.tensors["values"].fill_(7);  // the next step
    EXPECT_TRUE(writer.finish(1, kLong));
    ASSERT_EQ(writer.take_saved().size(), 1U);
    EXPECT_TRUE(writer.take_saved().empty());
  }
  EXPECT_EQ(newest_step(folder), 1);
}

TEST(CheckpointWriter, writes_every_save_on_a_disk_that_answers) {
  const TempFolder folder;
  {
    CheckpointWriter writer{CheckpointFolder(folder.path())};
    for (const int step : {1, 2, 3, 4, 5}) writer.save(step, state_of(step));
  }
  EXPECT_EQ(newest_step(folder), 5);
  EXPECT_TRUE(folder.has("step-00000004.safetensors"));
}

TEST(CheckpointWriter, goes_on_after_a_save_that_failed) {
  const TempFolder folder;
  CheckpointWriter writer{CheckpointFolder(folder.path())};
  writer.save(1, state_of(1));
  ASSERT_TRUE(writer.finish(1, kLong));
  block_checkpoint(folder, 2);
  writer.save(2, state_of(2));
  EXPECT_FALSE(writer.finish(2, kLong));
  EXPECT_TRUE(contains(writer.trouble(), "can't rename a finished file to"));
  EXPECT_TRUE(folder.has("step-00000001.safetensors"));
  writer.save(3, state_of(3));
  EXPECT_TRUE(writer.finish(3, kLong));
}

TEST(CheckpointWriter, leaves_saves_out_while_the_disk_does_not_answer) {
  const TempFolder folder;
  testing::HeldDisk disk(folder / "disk");
  CheckpointWriter writer{CheckpointFolder(folder.path()), std::chrono::milliseconds(1)};
  writer.save(1, state_of(1));
  const Stopwatch watch;
  writer.save(2, state_of(2));
  writer.save(3, state_of(3));
  EXPECT_FALSE(writer.finish(3, std::chrono::milliseconds(1)));
  EXPECT_LT(watch.seconds(), 60);
  EXPECT_TRUE(contains(writer.trouble(), "the disk does not answer"));
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { writer.folder(); }), "the disk does not answer"));
  disk.answer();
  ASSERT_TRUE(comes_true([&] { return writer.save(4, state_of(4)), writer.finish(4, kLong); }));
  EXPECT_FALSE(folder.has("step-00000002.safetensors"));
}

TEST(CheckpointWriter, receives_what_other_ranks_send_whether_or_not_it_can_be_written) {
  const TempFolder folder;
  TensorFile file = state_of(1);
  for (const char* name : {"t1", "t2", "t3"}) file.tensors[name] = torch::empty({4}, torch::kMeta);
  std::vector<std::string> received;
  const FetchTensor fetch = [&](const std::string& name) {
    received.push_back(name);
    return torch::zeros({4});
  };
  CheckpointWriter writer{CheckpointFolder(folder.path())};
  block_checkpoint(folder, 1);
  writer.save(1, file, fetch);
  EXPECT_EQ(received, (std::vector<std::string>{"t1", "t2", "t3"}));
  EXPECT_FALSE(writer.finish(1, kLong));
  writer.save(2, file, fetch);
  EXPECT_EQ(received.size(), 6U);
  EXPECT_TRUE(writer.finish(2, kLong));
}

TEST(CheckpointWriter, passes_on_the_error_of_another_rank) {
  const TempFolder folder;
  TensorFile file = state_of(1);
  file.tensors["t"] = torch::empty({4}, torch::kMeta);
  CheckpointWriter writer{CheckpointFolder(folder.path())};
  const auto lost = [](const std::string&) -> torch::Tensor { throw PeerLost({.what = "rank 1 is gone"}); };
  EXPECT_TRUE(contains(message_of<PeerLost>([&] { writer.save(1, file, lost); }), "rank 1 is gone"));
}

constexpr size_t kTwoTensors = 4096 + 4;  // of state_of()

// Five tensors of 4 KiB and a byte, in five files.
TensorFile large_state(int step) {
  TensorFile file = state_of(step);
  for (const char* name : {"a", "b", "c", "d"}) file.tensors[name] = torch::full({1024}, step, torch::kFloat32);
  return file;
}

void expect_large_state(const CheckpointReader& file, int step) {
  EXPECT_EQ(file.metadata(), large_state(step).metadata);
  ASSERT_EQ(file.entries().size(), 6U);
  for (const auto& [name, tensor] : large_state(step).tensors)
    EXPECT_TRUE(torch::equal(file.read(name), tensor)) << name;
}

TEST(Shards, hold_a_large_checkpoint_and_leave_with_it) {
  const TempFolder folder;
  {
    CheckpointWriter writer{CheckpointFolder(folder.path(), /*keep=*/1, kTwoTensors)};
    for (const int step : {1, 2}) writer.save(step, large_state(step));
    ASSERT_TRUE(writer.finish(2, kLong));
    for (const char* shard : {"1-of-00005", "5-of-00005"}) {
      EXPECT_FALSE(folder.has(concat("step-00000001-0000", shard, ".safetensors")));
      EXPECT_TRUE(folder.has(concat("step-00000002-0000", shard, ".safetensors")));
    }
    EXPECT_FALSE(folder.has("step-00000001.safetensors.index.json"));
    expect_large_state(writer.folder().load_newest()->file, 2);
  }
  const TensorFile loaded = load_safetensors(folder / "step-00000002.safetensors.index.json");
  EXPECT_TRUE(torch::equal(loaded.tensors.at("c"), torch::full({1024}, 2, torch::kFloat32)));
}

TEST(Shards, are_written_alike_from_a_copy_and_as_they_come) {
  const TempFolder copied, streamed;
  StateCopy copy;
  CheckpointFolder(copied.path(), 2, kTwoTensors).save(3, copy.copy(large_state(3)));
  CheckpointFolder(streamed.path(), 2, kTwoTensors).save(3, large_state(3));
  for (const auto& entry : std::filesystem::directory_iterator(streamed.path()))
    if (entry.path().filename() != ".lock") {
      EXPECT_EQ(read_file(copied / entry.path().filename()), read_file(entry.path())) << entry.path();
    }
}

TEST(Shards, damaged_or_missing_are_skipped) {
  const TempFolder folder;
  {
    CheckpointFolder checkpoints(folder.path(), 3, kTwoTensors);
    for (const int step : {1, 2, 3}) checkpoints.save(step, large_state(step));
    std::filesystem::remove(folder / "step-00000003-00002-of-00005.safetensors");
    std::filesystem::resize_file(folder / "step-00000002-00005-of-00005.safetensors", 100);
    expect_large_state(checkpoints.load_newest()->file, 1);
    for (const char* one : {"step-00000003.safetensors.index.json", "step-00000003-00005-of-00005.safetensors",
                            "step-00000002-00001-of-00005.safetensors"})
      EXPECT_TRUE(folder.has(concat(one, ".damaged")) && !folder.has(one)) << one;
    for (const char* shard : {"00001", "00002"})
      std::filesystem::copy_file(folder / "step-00000002-00001-of-00005.safetensors.damaged",
                                 folder / concat("step-00000001-", shard, "-of-00005.safetensors"),
                                 std::filesystem::copy_options::overwrite_existing);
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpoints.load_newest(); }), "none of the 1"));
    checkpoints.save(2, large_state(2));
  }
  std::filesystem::remove(folder / "step-00000002.safetensors.index.json");  // killed before it was written
  CheckpointFolder{folder.path()};
  EXPECT_FALSE(folder.has("step-00000002-00001-of-00005.safetensors"));
  EXPECT_TRUE(folder.has("step-00000001-00001-of-00005.safetensors"));
}

TEST(Shards, index_from_elsewhere_opens_no_other_folder) {
  const TempFolder folder;
  write_file(folder / "x.safetensors.index.json", R"({"weight_map": {"a": "../other.safetensors"}})");
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { load_safetensors(folder / "x.safetensors.index.json"); }),
                       "is in another folder"));
  write_file(folder / "x.safetensors.index.json", R"({"weight_map": 7})");
  EXPECT_THROW(load_safetensors(folder / "x.safetensors.index.json"), CheckpointError);
}

// Nothing comes of the last shard.
TEST(Shards, stay_whole_when_their_step_cannot_be_saved_again) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path(), /*keep=*/1, kTwoTensors);
  checkpoints.save(1, large_state(1));
  TensorFile again = large_state(7);
  again.tensors["z"] = torch::empty({4}, torch::kMeta);  // the last of all
  const auto fails = [](const std::string&) -> torch::Tensor { throw SystemError({.what = "no room"}); };
  const auto expect = [&](int state) {
    const auto newest = checkpoints.load_newest();
    ASSERT_TRUE(newest);
    expect_large_state(newest->file, state);
  };
  for (int time = 0; time < 2; ++time) {
    EXPECT_THROW(checkpoints.save(1, again, fails), SystemError);
    expect(1);
  }
  for (const int state : {3, 4, 5}) {  // and is replaced by what can be saved
    checkpoints.save(1, large_state(state));
    expect(state);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 5 + 1 + 1) << state;  // and .lock
  }
}

TEST(CheckpointFolder, has_one_writer_and_names_it) {
  const TempFolder folder;
  const CheckpointFolder first(folder.path());
  write_file(folder / "step-00000002.safetensors.tmp-0123456789abcdef", "half");  // of the first
  const std::string message = message_of<CheckpointError>([&] { CheckpointFolder(folder.path()); });
  EXPECT_TRUE(contains(message, concat("is in use by process ", ::getpid(), " on ")));
  EXPECT_TRUE(folder.has("step-00000002.safetensors.tmp-0123456789abcdef"));
}

// Kills it in the midst of a save, over and over.
TEST(CheckpointWriter, killed_while_it_writes_leaves_a_whole_checkpoint) {
  const TempFolder folder;
  for (int round = 0; round < 5; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(120);
      CheckpointWriter writer{CheckpointFolder(folder.path())};
      for (int step = 1;; ++step) writer.save(step, state_of(step, 16 << 20));
    }
    const auto is_half_written = [&] {  // after a first one
      bool one = false, half = false;
      std::error_code gone;
      for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        one = one || entry.path().extension() == ".safetensors";
        half = half || (contains(entry.path(), ".tmp-") && entry.file_size(gone) + 1 > 1);
      }
      return one && half;
    };
    EXPECT_TRUE(comes_true(is_half_written));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_GT(newest_step(folder), 0);
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) std::filesystem::remove(entry);
  }
}

// Tensors of zeros that take no memory.
torch::Tensor zeros(int64_t bytes) {
  void* const memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return torch::from_blob(
      memory, {bytes}, [bytes](void* p) { ::munmap(p, static_cast<size_t>(bytes)); }, torch::kUInt8);
}

TEST(CheckpointWriter, saves_a_tensor_of_more_than_2_gib) {
  const TempFolder folder;
  const int64_t bytes = (int64_t{1} << 31) + 3;
  TensorFile file = {.tensors = {{"large", zeros(bytes)}, {"small", torch::tensor({1.5})}}, .metadata = {}};
  for (const int64_t at : {int64_t{0}, bytes / 2, bytes - 1}) file.tensors["large"][at] = 7;
  {
    CheckpointWriter writer{CheckpointFolder(folder.path())};
    writer.save(1, file);
    ASSERT_TRUE(writer.finish(1, 5 * kLong)) << writer.trouble();
  }
  const auto newest = CheckpointFolder(folder.path()).load_newest();
  ASSERT_TRUE(newest);
  const torch::Tensor large = newest->file.read("large");
  EXPECT_EQ(large.numel(), bytes);
  for (const int64_t at : {int64_t{0}, bytes / 2, bytes - 1}) EXPECT_EQ(large[at].item<int>(), 7);
  EXPECT_EQ(large[bytes - 2].item<int>(), 0);
  EXPECT_EQ(newest->file.read("small").item<float>(), 1.5F);
}

TEST(OwnCheckpoints, refuse_to_save_below_a_checkpoint_that_they_have_not_read) {
  const TempFolder folder;
  Checkpoints(folder.path()).save(1000, state_of(1000));
  {
    Checkpoints checkpoints(folder.path());  // of a program that begins anew
    const std::string message = message_of<CheckpointError>([&] { checkpoints.save(1, state_of(1)); });
    EXPECT_TRUE(contains(message, "step 1:")) << message;
    EXPECT_TRUE(contains(message, "step 1000")) << message;
    checkpoints.save(1000, state_of(1000));  // nothing is above it
    checkpoints.finish(1000);
  }
  {
    CheckpointFolder from_memory(folder.path());  // of a job that goes on after the loss of a rank
    EXPECT_THROW(from_memory.require_newest(999), CheckpointError);
    from_memory.take_over();
    from_memory.require_newest(999);
  }
  Checkpoints checkpoints(folder.path());
  EXPECT_TRUE(checkpoints.newest());
  checkpoints.save(1001, state_of(1001));
  checkpoints.finish(1001);
  EXPECT_TRUE(folder.has("step-00001000.safetensors"));
}

TEST(OwnCheckpoints, move_later_checkpoints_aside_when_they_go_back_on_purpose) {
  const TempFolder folder;
  {
    Checkpoints checkpoints(folder.path());
    for (const int step : {500, 1000}) checkpoints.save(step, state_of(step));
    checkpoints.finish(1000);
  }
  const std::string message = message_of<CheckpointError>([&] { Checkpoints(folder.path(), /*after=*/400); });
  EXPECT_TRUE(contains(message, "no checkpoint of step 400"));
  Checkpoints checkpoints(folder.path(), /*after=*/500);
  EXPECT_EQ(checkpoints.newest()->filename(), "step-00000500.safetensors");
  checkpoints.save(501, state_of(501));
  checkpoints.save(502, state_of(502));
  checkpoints.finish(502);
  EXPECT_EQ(load_safetensors(folder / "step-00001000.safetensors.after-500").metadata.at("step"), "1000");
  EXPECT_FALSE(folder.has("step-00001000.safetensors"));
  EXPECT_TRUE(folder.has("step-00000501.safetensors"));
}

// Also a later one that this run has found, or saved itself.
TEST(OwnCheckpoints, remove_no_later_checkpoint) {
  const TempFolder folder;
  Checkpoints(folder.path()).save(1000, state_of(1000));
  Checkpoints checkpoints(folder.path());
  EXPECT_TRUE(checkpoints.newest());
  for (const int step : {1, 2, 1}) checkpoints.save(step, state_of(step));
  checkpoints.finish(1);
  for (const int step : {1000, 2})
    EXPECT_EQ(load_safetensors(folder / concat("step-0000", step == 2 ? "0002" : "1000", ".safetensors.after-1"))
                  .metadata.at("step"),
              concat(step));
  EXPECT_EQ(checkpoints.newest()->filename(), "step-00000001.safetensors");
}

TEST(OwnCheckpoints, refuse_what_cannot_be_saved_at_the_call) {
  const TempFolder folder;
  Checkpoints checkpoints(folder.path());
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         checkpoints.save(1, {.tensors = {{"__metadata__", torch::zeros({3})}}, .metadata = {}});
                       }),
                       "__metadata__"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         checkpoints.save(1, {.tensors = {}, .metadata = {{"lockstep.xxh3", "mine"}}});
                       }),
                       "lockstep.xxh3"));
}

TEST(OwnCheckpoints, are_written_while_the_loop_goes_on_and_the_newest_is_found) {
  const TempFolder folder;
  {
    Checkpoints checkpoints(folder.path());
    EXPECT_FALSE(checkpoints.newest());
    for (int step = 1; step <= 3; ++step) checkpoints.save(step, state_of(step));
    checkpoints.finish(3);
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { Checkpoints(folder.path()); }), "is in use by process"));
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpoints.finish(7, std::chrono::milliseconds(1)); }),
                         "the checkpoint of step 7 is not saved"));
  }
  const auto newest = Checkpoints(folder.path()).newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(load_safetensors(*newest).metadata.at("step"), "3");
  EXPECT_FALSE(folder.has("step-00000001.safetensors")) << "only the newest two are kept";
}

}  // namespace
}  // namespace lockstep
