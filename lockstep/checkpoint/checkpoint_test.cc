// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;

TensorFile sample() {
  return {.tensors = {{"bias", torch::tensor({1.5, -2.0}, torch::kFloat64)},
                      {"empty", torch::empty({0, 3})},
                      {"scalar", torch::tensor(7, torch::kInt64)},
                      {"flags", torch::tensor({true, false, true})},
                      {"weight", torch::arange(24, torch::kFloat32)
                                     .reshape({1, 2, 3, 4})
                                     .contiguous(torch::MemoryFormat::ChannelsLast)}},
          .metadata = {{"position", "{\"step\":3}"}}};
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Safetensors, gives_back_what_was_written) {
  const TensorFile file = from_safetensors(to_safetensors(sample()), "memory");
  EXPECT_EQ(file.metadata, sample().metadata);
  ASSERT_EQ(file.tensors.size(), 5U);
  for (const auto& [name, tensor] : sample().tensors) {
    EXPECT_EQ(file.tensors.at(name).dtype(), tensor.dtype());
    EXPECT_TRUE(torch::equal(file.tensors.at(name), tensor)) << name;
  }
}

// Bytes as another tool writes them: no checksum, no padding.
TEST(Safetensors, reads_a_file_of_another_tool) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  std::string bytes{static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
  const float values[] = {0.5F, -3};
  bytes += header + std::string(reinterpret_cast<const char*>(values), sizeof values);
  EXPECT_TRUE(torch::equal(from_safetensors(bytes, "other").tensors.at("w"), torch::tensor({0.5F, -3.0F})));
}

TEST(Safetensors, refuses_a_file_cut_at_any_byte) {
  const std::string bytes = to_safetensors(sample());
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_THROW(from_safetensors(bytes.substr(0, length), "cut"), CheckpointError) << length;
}

TEST(Safetensors, refuses_a_change_of_any_byte) {
  const std::string bytes = to_safetensors(sample());
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    EXPECT_THROW(from_safetensors(changed, "changed", Checksum::kRequired), CheckpointError) << "byte " << at;
  }
}

// Random changes and no checksum: an error or a file, never a crash. Longer rounds run in `make soak`.
TEST(Safetensors, survives_mutated_files) {
  const std::string original = to_safetensors(sample());
  std::mt19937 random(1);
  for (int round = 0; round < testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 300); ++round) {
    std::string bytes = original;
    for (int change = 0; change < 3; ++change) bytes[random() % bytes.size()] = static_cast<char>(random());
    const std::size_t position = bytes.find("lockstep.xxh3");
    if (position != std::string::npos) bytes[position] = 'L';  // else the checksum would refuse nearly all of them
    try {
      EXPECT_LE(from_safetensors(bytes, "mutated").tensors.size(), 6U);
    } catch (const CheckpointError&) {
    }
  }
}

TEST(Safetensors, refuses_offsets_outside_of_the_file) {
  const auto refuse = [](const std::string& header) {
    std::string bytes{static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
    EXPECT_THROW(from_safetensors(bytes + header + std::string(8, 'x'), "hostile"), CheckpointError) << header;
  };
  refuse(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})");
  refuse(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})");
  refuse(R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})");
  refuse(R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})");
  refuse(R"({"w":{"dtype":"F32","shape":[2]}})");
  refuse(R"({"w":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}})");
  refuse(R"({"w":7})");
  refuse(R"([1,2])");
}

TEST(Safetensors, refuses_tensors_that_overlap_or_leave_a_gap_and_reads_them_in_any_order) {
  const auto read = [](const std::string& first, const std::string& second) {
    const std::string header = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
                               R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
    std::string bytes{static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
    return from_safetensors(bytes + header + "01234567", "hostile");
  };
  EXPECT_EQ(read("[4,8]", "[0,4]").tensors.at("a")[0].item<int>(), '4');
  const auto refusal = [&](const std::string& first, const std::string& second) {
    return testing::message_of<CheckpointError>([&] { read(first, second); });
  };
  EXPECT_TRUE(testing::contains(refusal("[0,4]", "[0,4]"), "overlap or leave a gap at byte 0"));
  EXPECT_TRUE(testing::contains(refusal("[0,4]", "[2,6]"), "overlap or leave a gap at byte 2"));
  EXPECT_TRUE(testing::contains(refusal("[1,5]", "[0,4]"), "overlap or leave a gap at byte 1"));
}

TEST(CheckpointFolder, keeps_the_newest) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path(), /*keep=*/2);
  for (const int step : {9, 99999999, 100000000}) checkpoints.save(step, sample());
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"step-100000000.safetensors", "step-99999999.safetensors"}));
  EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-100000000.safetensors");
}

TEST(CheckpointFolder, removes_later_checkpoints_when_a_run_went_on_from_an_earlier_one) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  for (const int step : {1, 2, 3}) checkpoints.save(step, sample());
  checkpoints.save(1, sample());
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"step-00000001.safetensors"});
}

TEST(CheckpointFolder, removes_half_written_files_of_a_killed_run) {
  const TempFolder folder;
  write_file(folder / "step-00000002.safetensors.tmp-4711", "half");
  EXPECT_TRUE(CheckpointFolder(folder.path()).empty());
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(CheckpointFolder, loads_the_newest_undamaged_file) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  checkpoints.save(1, sample());
  checkpoints.save(2, sample());
  std::filesystem::resize_file(folder / "step-00000002.safetensors", 100);
  EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-00000001.safetensors");
}

TEST(CheckpointFolder, loads_nothing_from_an_empty_folder) {
  const TempFolder folder;
  EXPECT_FALSE(CheckpointFolder(folder / "new").load_newest().has_value());
}

TEST(CheckpointFolder, throws_when_every_file_is_damaged) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  write_file(folder / "step-00000002.safetensors", "rubbish");
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpoints.load_newest(); }), "none of the 1 checkpoints"));
}

TEST(CheckpointFolder, throws_at_once_for_a_folder_that_is_not_writable) {
  const TempFolder folder;
  write_file(folder / "file", "");
  const std::string message = message_of<CheckpointError>([&] { CheckpointFolder(folder / "file" / "below"); });
  EXPECT_TRUE(contains(message, "can't write checkpoints into"));
}

TEST(AtomicFile, keeps_the_old_file_and_removes_the_new_one_without_commit) {
  const TempFolder folder;
  write_file(folder / "file", "old");
  {
    AtomicFile file(folder / "file");
    file.write("new", 3);
  }
  EXPECT_EQ(read_file(folder / "file"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"file"});
}

}  // namespace
}  // namespace lockstep
