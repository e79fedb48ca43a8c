// SPDX-License-Identifier: Apache-2.0
// lockstep/strategy/lossless_test.cc with ranks as processes.
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors.h"
#include "tests/launch/child.h"
#include "tests/lossless.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::Courses;

class LosslessProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LosslessProcesses, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(LosslessProcesses, train_as_one_rank_does) {
  const testing::TempFolder folder;
  const auto ended = testing::run({LOCKSTEP_COMMAND, "run", "--nproc-per-node", std::to_string(GetParam()), "--",
                                   LOSSLESS_RANKS, folder.file("courses")});
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  TensorFile file = load_safetensors(folder / "courses");
  World alone = World::single();
  const Courses one = testing::lossless_courses(alone);
  Courses many;
  for (const auto& [name, tensors] : one)
    for (size_t i = 0; i < tensors.size(); ++i) many[name].push_back(file.tensors[concat(name, "/", i)]);
  testing::expect_same_courses(many, one);
}

// The newest checkpoint of LeNet after `steps` steps on `ranks` ranks; goes on from what `folder` holds.
std::map<std::string, torch::Tensor> trained_in_shards(const testing::TempFolder& folder, int ranks, int steps) {
  const auto ended =
      testing::run({LOCKSTEP_COMMAND, "train", "--data", "fashion-mnist", "--virtual-shards", "4", "--ranks",
                    std::to_string(ranks), "--batch-size", "30", "--momentum", "0.9", "--max-steps",
                    std::to_string(steps), "--checkpoint-dir", folder.path(), "--resume", "--quiet"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  const auto newest = CheckpointFolder(folder.path()).load_newest();
  if (!newest) throw std::runtime_error("no checkpoint was written");
  return load_safetensors(newest->path).tensors;
}

TEST(VirtualShards, resume_bit_exactly_on_another_number_of_ranks) {
  const testing::TempFolder alone, changing;
  const auto uninterrupted = trained_in_shards(alone, 1, 6);
  trained_in_shards(changing, 2, 2);
  trained_in_shards(changing, 4, 4);
  const auto resumed = trained_in_shards(changing, 1, 6);
  ASSERT_EQ(resumed.size(), uninterrupted.size());
  for (const auto& [name, tensor] : uninterrupted) EXPECT_TRUE(torch::equal(resumed.at(name), tensor)) << name;
}

}  // namespace
}  // namespace lockstep
