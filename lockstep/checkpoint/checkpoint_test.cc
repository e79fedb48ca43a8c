// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <random>

#include "lockstep/base/files/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/checkpoint/safetensors.h"
#include "tests/safetensors.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::from_safetensors;
using testing::message_of;
using testing::TempFolder;
using testing::to_safetensors;

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

TEST(Safetensors, saves_every_dtype_that_the_format_has) {
  TensorFile file;
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt64,
                           torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8, torch::kUInt16, torch::kUInt32,
                           torch::kUInt64, torch::kBool, torch::kFloat8_e4m3fn, torch::kFloat8_e4m3fnuz,
                           torch::kFloat8_e5m2, torch::kFloat8_e5m2fnuz, torch::kComplexFloat})
    file.tensors[c10::toString(dtype)] = torch::tensor({{1, 0, 3}, {4, 5, 6}}, torch::kFloat32).to(dtype).t();
  const TempFolder folder;
  save_safetensors(folder / "file", file);
  StateCopy copy;
  save_safetensors(folder / "copy", copy.copy(file));
  EXPECT_EQ(read_file(folder / "copy"), read_file(folder / "file"));
  for (const auto& [name, tensor] : load_safetensors(folder / "file").tensors) {
    EXPECT_EQ(tensor.dtype(), file.tensors.at(name).dtype());
    const auto wide = tensor.is_complex() ? torch::kComplexDouble : torch::kFloat64;
    EXPECT_TRUE(torch::equal(tensor.to(wide), file.tensors.at(name).to(wide))) << name;
  }
}

// torch keeps a conjugate as the numbers and a mark.
TEST(Safetensors, saves_the_values_of_conjugates_and_of_their_parts) {
  const torch::Tensor conjugate = torch::complex(torch::ones({3}), torch::arange(3, torch::kFloat32)).conj();
  const TensorFile file = {.tensors = {{"conjugate", conjugate}, {"part", torch::imag(conjugate)}}, .metadata = {}};
  const TempFolder folder;
  StateCopy copy;
  save_safetensors(folder / "copy", copy.copy(file));
  EXPECT_EQ(read_file(folder / "copy"), to_safetensors(file));
  for (const auto& [name, tensor] : load_safetensors(folder / "copy").tensors)
    EXPECT_TRUE(torch::equal(tensor, file.tensors.at(name))) << name;
}

TEST(Safetensors, refuses_names_that_the_format_has_for_itself) {
  const TempFolder folder;
  const TensorFile tensor = {.tensors = {{"__metadata__", torch::zeros({3})}}, .metadata = {}};
  const TensorFile key = {.tensors = {}, .metadata = {{"lockstep.xxh3", "mine"}}};
  EXPECT_TRUE(contains(message_of<UsageError>([&] { save_safetensors(folder / "a", tensor); }), "__metadata__"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { save_safetensors(folder / "a", key); }), "lockstep.xxh3"));
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(Safetensors, refuses_a_file_cut_at_any_byte) {
  const std::string bytes = to_safetensors(sample());
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_THROW(from_safetensors(bytes.substr(0, length), "cut"), CheckpointError) << length;
}

TEST(Safetensors, refuses_a_change_of_any_byte) {
  const std::string bytes = to_safetensors(sample());
  for (size_t at = 0; at < bytes.size(); ++at) {
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
    const size_t position = bytes.find("lockstep.xxh3");
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

TEST(CheckpointFolder, removes_half_written_files_of_a_killed_run) {
  const TempFolder folder;
  for (const char* half : {"step-00000002.safetensors.tmp-0123456789abcdef", "step-00000003-00001-of-00002.safetensors",
                           "step-00000003.safetensors.index.json.tmp-0123456789abcdef", ".lock.tmp-0123456789abcdef"})
    write_file(folder / half, "half");
  EXPECT_TRUE(CheckpointFolder(folder.path()).empty());
  EXPECT_TRUE(names_in(folder.path()).empty());
}

// Names that are nearly those of lockstep.
TEST(CheckpointFolder, leaves_files_alone_whose_names_it_does_not_make) {
  const TempFolder folder;
  const std::vector<std::string> foreign = {".writable",
                                            "step-00000001-best.safetensors",
                                            "step-00000001-1-of-2.safetensors",
                                            "step-00000001-00000-of-00002.safetensors",
                                            "step-00000001-00003-of-00002.safetensors",
                                            "step-00000001-00001-of-00002.safetensors.bak",
                                            "step-00000001.safetensors.bak",
                                            "step-00000001.safetensors.tmp-4711",
                                            "step-00000001.safetensors.tmp-0123456789abcdeF",
                                            "step-00000001.safetensors.tmp-0123456789abcdef0",
                                            "step-00000001.tmp-0123456789abcdef",
                                            "step-000000001.safetensors",
                                            "step-1.safetensors",
                                            "step--0000001.safetensors"};
  for (const std::string& name : foreign) write_file(folder / name, name);
  std::filesystem::create_directories(folder / "step-00000007.safetensors");  // no file
  {
    CheckpointFolder checkpoints(folder.path(), /*keep=*/1);
    EXPECT_TRUE(checkpoints.empty());
    for (const int step : {1, 2}) checkpoints.save(step, sample());
  }
  EXPECT_EQ(CheckpointFolder(folder.path()).load_newest()->path.filename(), "step-00000002.safetensors");
  for (const std::string& name : foreign) EXPECT_EQ(read_file(folder / name), name);
  EXPECT_EQ(names_in(folder.path()).size(), foreign.size() + 2);
}

TEST(CheckpointFolder, loads_the_newest_undamaged_file) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  checkpoints.save(1, sample());
  checkpoints.save(2, sample());
  std::filesystem::resize_file(folder / "step-00000002.safetensors", 100);
  EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-00000001.safetensors");
}

TEST(CheckpointFolder, keeps_the_newest_two_that_are_whole_and_renames_a_damaged_one) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  for (const int step : {1, 2}) checkpoints.save(step, sample());
  write_file(folder / "step-00000003.safetensors", "damaged");
  write_file(folder / "step-00000003.safetensors.damaged", "of an earlier time");
  EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-00000002.safetensors");
  EXPECT_EQ(read_file(folder / "step-00000003.safetensors.damaged"), "of an earlier time");
  EXPECT_EQ(read_file(folder / "step-00000003.safetensors.damaged-2"), "damaged");
  checkpoints.save(4, sample());
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"step-00000002.safetensors", "step-00000003.safetensors.damaged",
                                      "step-00000003.safetensors.damaged-2", "step-00000004.safetensors"}));
}

// A link to itself can't be read, but that does not say that it is damaged.
TEST(CheckpointFolder, stops_at_one_that_cannot_be_read_and_renames_nothing) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  checkpoints.save(1, sample());
  std::filesystem::create_symlink("step-00000002.safetensors", folder / "step-00000002.safetensors");
  EXPECT_TRUE(contains(message_of<SystemError>([&] { checkpoints.load_newest(); }), "step-00000002.safetensors"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "step-00000002.safetensors"));
}

TEST(CheckpointFolder, goes_back_only_to_a_whole_checkpoint_and_moves_nothing_else) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  for (const int step : {1, 2}) checkpoints.save(step, sample());
  write_file(folder / "step-00000001.safetensors", "damaged");
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpoints.go_back(1); }), "is damaged"));
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"step-00000001.safetensors", "step-00000002.safetensors"}));
}

TEST(CheckpointFolder, goes_back_to_the_same_step_as_often_as_told) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path(), 2, /*shard_bytes=*/50);
  for (const int again : {1, 2, 3}) {
    for (const int step : {1, 2}) checkpoints.save(step, sample());
    checkpoints.go_back(1);
    EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-00000001.safetensors.index.json");
    const std::string end = again == 1 ? ".after-1" : ".after-1-" + std::to_string(again);
    for (const char* name : {"step-00000002.safetensors.index.json", "step-00000002-00002-of-00002.safetensors"})
      EXPECT_TRUE(folder.has(name + end)) << end;
  }
}

// As a kill leaves it between a save of the other kind and the end of what was there.
TEST(CheckpointFolder, finds_a_whole_checkpoint_beside_a_damaged_one_of_the_same_step) {
  const TempFolder folder;
  CheckpointFolder(folder.path(), 2, /*shard_bytes=*/50).save(1, sample());
  save_safetensors(folder / "step-00000001.safetensors", sample());
  std::filesystem::remove(folder / "step-00000001-00001-of-00002.safetensors");
  CheckpointFolder checkpoints(folder.path());
  EXPECT_EQ(checkpoints.load_newest()->path.filename(), "step-00000001.safetensors");
  for (const char* other : {"step-00000001.safetensors.index.json", "step-00000001-00002-of-00002.safetensors"}) {
    EXPECT_FALSE(folder.has(other));
    EXPECT_TRUE(folder.has(std::string(other) + ".damaged"));
  }
}

TEST(CheckpointFolder, loads_nothing_from_an_empty_folder) {
  const TempFolder folder;
  EXPECT_FALSE(CheckpointFolder(folder / "new").load_newest().has_value());
}

TEST(CheckpointFolder, throws_when_every_file_is_damaged) {
  const TempFolder folder;
  CheckpointFolder checkpoints(folder.path());
  write_file(folder / "step-00000002.safetensors", "rubbish");
  for (int again = 0; again < 2; ++again)  // and no run begins at step 0 unasked
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

TEST(AtomicFile, follows_no_link_that_lies_where_its_temporary_file_would_be) {
  const TempFolder folder;
  write_file(folder / "precious", "precious");
  const std::string name = (folder / "file").string() + ".tmp-" + std::to_string(::getpid());
  std::filesystem::create_symlink(folder / "precious", name);
  write_file(folder / "file", "new");
  EXPECT_EQ(read_file(folder / "precious"), "precious");
  EXPECT_TRUE(std::filesystem::is_symlink(name));
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "file"));
}

TEST(AtomicFile, lets_two_writers_of_a_path_write_whole_files) {
  const TempFolder folder;
  AtomicFile one(folder / "file"), other(folder / "file");
  one.write("one", 3);
  other.write("other", 5);
  one.commit();
  EXPECT_EQ(read_file(folder / "file"), "one");
  other.commit();
  EXPECT_EQ(read_file(folder / "file"), "other");
}

TEST(CheckpointFolder, follows_no_link_in_place_of_its_lock) {
  const TempFolder folder;
  write_file(folder / "precious", "precious");
  std::filesystem::create_symlink("precious", folder / ".lock");
  EXPECT_THROW(CheckpointFolder(folder.path()), Error);
  EXPECT_EQ(read_file(folder / "precious"), "precious");
}

}  // namespace
}  // namespace lockstep
