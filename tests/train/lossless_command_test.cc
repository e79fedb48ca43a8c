// lockstep/strategy/lossless_test.cc with ranks as processes.
#include "lockstep/base/text.h"
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
  const auto ended = testing::run({LOCKSTEP_COMMAND, "run", "--nproc-per-node", std::to_string(GetParam()), "--", LOSSLESS_RANKS,
                                   folder.file("courses")});
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  TensorFile file = load_safetensors(folder / "courses");
  World alone = World::single();
  const Courses one = testing::lossless_courses(alone);
  Courses many;
  for (const auto& [name, tensors] : one)
    for (std::size_t i = 0; i < tensors.size(); ++i) many[name].push_back(file.tensors[concat(name, "/", i)]);
  testing::expect_same_courses(many, one);
}

}  // namespace
}  // namespace lockstep
