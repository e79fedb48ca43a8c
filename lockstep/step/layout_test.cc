// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/layout.h"

#include <variant>

#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using enum StepLayout;

// Places to run in: two ranks that share a machine, one on each of two machines, and so on.
constexpr LayoutInput kMachine{.ranks = 2, .ranks_on_machine = 2, .is_fused = true};
constexpr LayoutInput kMachines{.ranks = 4, .ranks_on_machine = 2, .is_fused = true};
constexpr LayoutInput kGpus{.ranks = 2, .ranks_on_machine = 2, .is_on_gpus = true, .is_fused = true};
constexpr LayoutInput kGpusOnMachines{.ranks = 4, .ranks_on_machine = 2, .is_on_gpus = true, .is_fused = true};
constexpr LayoutInput kAlone{.is_fused = true};
constexpr LayoutInput kOneGpu{.is_on_gpus = true, .is_fused = true};

LayoutInput with_torch_optimizer(LayoutInput input) {
  input.is_fused = input.updates_all = false;
  return input;
}
LayoutInput with_lamb(LayoutInput input) {
  input.is_layerwise = true;
  return input;
}
LayoutInput with_sparse_gradients(LayoutInput input) {
  input.updates_all = false;
  return input;
}

const auto kHook = sixteen_bit_hook(torch::kBFloat16);

struct Row {
  const char* name;
  LayoutInput input;
  DistributedDataParallelOptions options;
  std::variant<StepLayout, const char*> expected;  // or a part of the error
};

const Row kRows[] = {
    // ---- cores
    {"one machine", kMachine, {}, kPublished},
    {"one rank", kAlone, {}, kPublished},
    {"several machines", kMachines, {}, kSharedBuckets},
    {"lamb", with_lamb(kMachine), {}, kPublished},
    {"sparse gradients", with_sparse_gradients(kMachine), {}, kPublished},
    {"torch's optimizer", with_torch_optimizer(kMachine), {}, kOwnBuckets},
    {"separate parameters", kMachine, {.share_parameters = false}, kOwnBuckets},
    {"separate parameters on machines", kMachines, {.share_parameters = false}, kOwnBuckets},
    {"mean_in_grad", kMachine, {.mean_in_grad = true}, kSharedBuckets},
    {"hook", kMachine, {.hook = kHook}, kSharedBuckets},
    {"hook on one rank", kAlone, {.hook = kHook}, kSharedBuckets},
    {"algorithm", kMachine, {.algorithm = Algorithm::kRing}, kSharedBuckets},
    {"slice_update is for GPUs", kMachine, {.slice_update = true}, kPublished},
    {"slice_update with separate parameters", kMachine, {.share_parameters = false, .slice_update = true}, kOwnBuckets},
    // ---- GPUs
    {"GPUs", kGpus, {}, kOwnBuckets},
    {"one GPU", kOneGpu, {.slice_update = true}, kOwnBuckets},
    {"sliced", kGpus, {.slice_update = true}, kSlices},
    {"sliced on machines", kGpusOnMachines, {.slice_update = true}, kSlices},
    {"sliced, separate parameters", kGpus, {.share_parameters = false, .slice_update = true}, kSlices},
    {"sliced, torch's optimizer", with_torch_optimizer(kGpus), {.slice_update = true}, kOwnBuckets},
    {"sliced, lamb", with_lamb(kGpus), {.slice_update = true}, kOwnBuckets},
    {"sliced, sparse gradients", with_sparse_gradients(kGpus), {.slice_update = true}, kOwnBuckets},
    {"sliced, mean_in_grad", kGpus, {.slice_update = true, .mean_in_grad = true}, kOwnBuckets},
    {"sliced, hook", kGpus, {.slice_update = true, .hook = kHook}, kOwnBuckets},
    {"sliced, algorithm", kGpus, {.slice_update = true, .algorithm = Algorithm::kRing}, kOwnBuckets},
    {"sliced, views", kGpus, {.slice_update = true, .gradient_as_bucket_view = true}, kOwnBuckets},
    // ---- virtual shards
    {"shards", kMachine, {.virtual_shards = 4}, kPublished},
    {"shards of one rank", kAlone, {.virtual_shards = 4}, kPublished},
    {"shards, lamb", with_lamb(kMachine), {.virtual_shards = 4}, kPublished},
    {"shards, too few", kMachine, {.virtual_shards = 3}, "3 virtual shards on 2 ranks: the ranks do not divide them"},
    {"shards, negative", kMachine, {.virtual_shards = -2}, "the ranks do not divide them"},
    {"shards, algorithm", kMachine, {.algorithm = Algorithm::kRing, .virtual_shards = 4}, "an algorithm by name and"},
    {"shards, hook", kMachine, {.hook = kHook, .virtual_shards = 4}, "a communication hook,"},
    {"shards, mean_in_grad", kMachine, {.mean_in_grad = true, .virtual_shards = 4}, "mean_in_grad need buckets"},
    {"shards on machines", kMachines, {.virtual_shards = 4}, "not all ranks are on the cores of one machine"},
    {"shards, separate", kMachine, {.share_parameters = false, .virtual_shards = 4}, "parameters are separate"},
    {"shards, torch's optimizer", with_torch_optimizer(kMachine), {.virtual_shards = 4}, "parameters are separate"},
    {"shards on GPUs", kGpus, {.slice_update = true, .virtual_shards = 4}, kSlices},
    {"shards on one GPU", kOneGpu, {.slice_update = true, .virtual_shards = 4}, kSlices},
    {"shards on GPUs, not sliced", kGpus, {.virtual_shards = 4}, "each GPU would have to update a slice"},
    {"shards on GPUs, lamb", with_lamb(kGpus), {.slice_update = true, .virtual_shards = 4}, "other than LAMB and LARS"},
    {"shards on GPUs, views",
     kGpus,
     {.slice_update = true, .gradient_as_bucket_view = true, .virtual_shards = 4},
     "gradient_as_bucket_view = false"},
    {"shards on GPUs, sparse gradients",
     with_sparse_gradients(kGpus),
     {.slice_update = true, .virtual_shards = 4},
     "no sparse gradients"},
};

TEST(StepLayouts, follows_from_world_device_optimizer_and_options) {
  for (const auto& [name, input, options, expected] : kRows) {
    SCOPED_TRACE(name);
    if (const StepLayout* const layout = std::get_if<StepLayout>(&expected)) {
      EXPECT_EQ(choose_layout(input, options), *layout);
    } else {
      const std::string message = message_of<UsageError>([&] { choose_layout(input, options); });
      EXPECT_TRUE(contains(message, std::get<const char*>(expected))) << message;
    }
  }
}

TEST(StepLayouts, of_virtual_shards_must_suit_the_fewest_ranks_that_may_go_on) {
  LayoutInput input = kMachine;
  input.ranks = input.ranks_on_machine = 4;
  input.fewest_ranks = 2;
  EXPECT_EQ(choose_layout(input, {.virtual_shards = 12}), kPublished);
  const std::string message = message_of<UsageError>([&] { choose_layout(input, {.virtual_shards = 8}); });
  EXPECT_TRUE(contains(message, "8 virtual shards can't be divided among 3 ranks")) << message;
}

}  // namespace
}  // namespace lockstep
