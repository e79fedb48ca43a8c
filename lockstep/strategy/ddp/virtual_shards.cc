// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/ddp/virtual_shards.h"

#include <cstdlib>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::vector<torch::Tensor> copies_of(const std::vector<NamedTensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const auto& [name, tensor] : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

void set_values(const std::vector<NamedTensor>& tensors, const std::vector<torch::Tensor>& values) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) torch::Tensor(tensors[i].tensor).copy_(values[i]);
}

}  // namespace

void require_shards_possible(const World& world, bool shares, const DistributedDataParallelOptions& options) {
  const int shards = options.virtual_shards;
  if (shards == 0) return;
  const auto require = [&](bool good, const std::string& why, const std::string& next) {
    if (!good)
      throw UsageError({.what = concat(shards, " virtual shards on ", world.size(), " ranks: ", why),
                        .here = world.describe(),
                        .next = next});
  };
  require(shards > 0 && shards % world.size() == 0, "the ranks do not divide them", "take a multiple of the ranks");
  require_shards_for_fewer_ranks(shards, fewest_ranks_of_launcher(), world.size());
  require(options.algorithm == Algorithm::kDirect, "an algorithm by name sums buckets", "leave one of the two out");
  require(!options.hook, "a communication hook sums gradients its own way", "leave one of the two out");
  require(!options.mean_in_grad, "mean_in_grad needs buckets", "leave one of the two out");
  if (!world.device().is_cpu())
    return require(shares, "each GPU would have to update a slice of the parameters",
                   "slice_update = true, gradient_as_bucket_view = false, and an optimizer of lockstep's other than "
                   "LAMB and LARS");
  require(world.local_size() == world.size(), "not all ranks are on the cores of one machine",
          "train on one machine, or without virtual shards");
  require(shares, "parameters are separate", "share_parameters = true, and an optimizer of lockstep's");
}

void require_shards_for_fewer_ranks(int shards, int fewest, int ranks) {
  constexpr std::int64_t kMostToPropose = 10'000;
  if (fewest == 0 || shards == 0) return;
  int undivided = 0;
  std::int64_t multiple = 1;  // of each number of ranks
  for (int left = fewest; left <= ranks; ++left) {
    if (shards % left != 0) undivided = left;
    if (multiple <= kMostToPropose) multiple = std::lcm(multiple, std::int64_t{left});
  }
  if (undivided == 0) return;
  const std::string all = concat("a multiple of each number from ", fewest, " to ", ranks);
  throw UsageError(
      {.what = concat(shards, " virtual shards can't be shared out among ", undivided, " ranks"),
       .here = concat("--virtual-shards ", shards, " --min-ranks ", fewest, ", ", ranks, " ranks"),
       .likely = concat("--min-ranks lets the job go on with any number of ranks from ", fewest, " to ", ranks),
       .next = multiple <= kMostToPropose ? concat("give --virtual-shards ", multiple, ", ", all)
                                          : concat("raise --min-ranks, or give ", all)});
}

int fewest_ranks_of_launcher() {
  const char* const told = std::getenv("LOCKSTEP_MIN_RANKS");
  int ranks = 0;
  return told != nullptr && parse_int(told, ranks) ? ranks : 0;
}

ShardBuffers::ShardBuffers(std::vector<NamedTensor> buffers, int shards)
    : buffers_(std::move(buffers)), shards_(shards) {
  begin_step();
}

bool ShardBuffers::finish_shard() {
  if (shards_ == 0) return true;
  if (done_ == 0) after_first_ = copies_of(buffers_);
  if (++done_ < shards_) {
    set_values(buffers_, at_beginning_);
    return false;
  }
  set_values(buffers_, after_first_);
  done_ = 0;
  return true;
}

void ShardBuffers::begin_step() {
  if (shards_ > 0) at_beginning_ = copies_of(buffers_);
}

}  // namespace lockstep
