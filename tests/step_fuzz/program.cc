// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/program.h"

#include <algorithm>
#include <bit>
#include <set>
#include <sstream>

namespace lockstep::fuzz {
namespace {

const std::vector<std::string> kActions{"backward",
                                        "no_sync backward",
                                        "loss.backward()",
                                        "failing forward",
                                        "failing backward",
                                        "backward of an old graph",
                                        "step",
                                        "zero_grad",
                                        "zero_grad(false)",
                                        "set_learning_rate",
                                        "set_lr of the last group",
                                        "load another state",
                                        "set_clipping norm",
                                        "set_clipping value",
                                        "mean_gradients()",
                                        "clip_grad_norm_",
                                        "clip_grad_value_",
                                        "freeze",
                                        "unfreeze",
                                        "keep_average too late",
                                        "load parameters",
                                        "save checkpoint",
                                        "load checkpoint",
                                        "write parameter",
                                        "write .data()",
                                        "join",
                                        "rebuild"};
const std::vector<std::string> kLayouts{"shared", "shared through buckets", "separate", "torch::optim"};
const std::vector<std::string> kRules{"SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "LAMB", "LARS"};
const std::vector<std::string> kHooks{"no hook",    "hook top-k of all", "hook float16", "hook bfloat16",
                                      "hook top-k", "hook two bits",     "hook PowerSGD"};
const std::vector<std::string> kNorms{"no norm", "batch norm of each rank", "synchronised batch norm"};

std::string ranks_text(Ranks ranks) {
  std::string text;
  for (int rank = 0; rank < kMaxParameters; ++rank)
    if (has(ranks, rank)) text += std::to_string(rank);
  return text;
}

void describe(std::ostream& out, const TrainerPlan& plan, int ranks) {
  out << name_of(plan.layout) << ", " << name_of(plan.rule) << " lr " << plan.lr << " weight decay "
      << plan.weight_decay << ", " << c10::toString(plan.dtype);
  if (plan.average > 0) out << ", average " << plan.average;
  if (plan.scaled) out << ", scaled";
  if (plan.shards > 0) out << ", " << plan.shards << " shards per rank";
  if (plan.hook != Hook::kNone) out << ", " << kHooks[static_cast<size_t>(plan.hook)];
  if (!plan.mean_in_grad) out << ", mean_in_grad left out";
  if (plan.small_buckets) out << ", small buckets";
  if (plan.bucket_view) out << ", bucket view";
  if (plan.wide) out << ", wide";
  if (plan.buffers) out << ", buffers";
  if (plan.alike) out << ", ranks count alike";
  if (plan.norm != Norm::kNone) out << ", " << kNorms[static_cast<size_t>(plan.norm)];
  if (plan.words) out << ", sparse embedding";
  if (plan.frozen != 0) out << ", frozen " << ranks_text(plan.frozen);
  if (plan.groups > 1) out << ", " << plan.groups << " parameter groups";
  if (plan.untold) out << ", an optimizer that the ranks are not told of";
  out << ", colors";
  for (int rank = 0; rank < ranks; ++rank) out << ' ' << plan.color[static_cast<size_t>(rank)];
}

void describe(std::ostream& out, const Operation& operation, int ranks) {
  out << "trainer " << operation.trainer << " ranks " << ranks_text(operation.ranks) << ": "
      << name_of(operation.action);
  if (operation.value != 0) out << ' ' << operation.value;
  if (operation.action == Action::kFreeze) out << ' ' << ranks_text(frozen_by(operation));
  if (operation.action == Action::kUnfreeze) out << ' ' << operation.parameter;
  if (is_backward(operation.action)) {
    out << " samples";
    for (int rank = 0; rank < ranks; ++rank) out << ' ' << operation.samples[static_cast<size_t>(rank)];
    for (int rank = 0; rank < ranks; ++rank)
      if (operation.unused[static_cast<size_t>(rank)] != 0)
        out << ", rank " << rank << " leaves out branches " << operation.unused[static_cast<size_t>(rank)];
    if (operation.halves) out << ", in halves";
    if (operation.overflow != 0) out << ", overflow on " << ranks_text(operation.overflow);
  }
  out << "  (id " << operation.id << ")";
}

void features_of(const TrainerPlan& plan, int ranks, std::set<std::string>& features) {
  features.insert(name_of(plan.layout));
  features.insert(name_of(plan.rule));
  features.insert(c10::toString(plan.dtype));
  if (plan.hook != Hook::kNone) features.insert(kHooks[static_cast<size_t>(plan.hook)]);
  if (plan.norm != Norm::kNone) features.insert(kNorms[static_cast<size_t>(plan.norm)]);
  const auto note = [&](bool there, const char* name) {
    if (there) features.insert(name);
  };
  note(plan.weight_decay > 0, "weight decay");
  note(plan.average > 0, "keep_average");
  note(plan.scaled, "loss scaling");
  note(plan.shards > 0, "virtual shards");
  note(plan.small_buckets, "small buckets");
  note(plan.bucket_view, "gradient_as_bucket_view");
  note(plan.wide, "large gradients");
  note(plan.buffers, "buffers");
  note(plan.alike, "ranks that count alike");
  note(plan.words, "sparse embedding");
  note(plan.frozen != 0, "frozen at first");
  note(std::popcount(plan.frozen) > 1, "several frozen at first");
  note(plan.groups > 1, "parameter groups by the dozen");
  note(plan.untold, "an optimizer that the ranks are not told of");
  for (int rank = 1; rank < ranks; ++rank) note(plan.color[static_cast<size_t>(rank)] != plan.color[0], "sub-worlds");
}

void features_of(const Operation& operation, int ranks, std::set<std::string>& features) {
  features.insert(name_of(operation.action));
  if (operation.ranks != all_of(ranks)) features.insert("on some ranks only");
  if (operation.overflow != 0) features.insert("overflow");
  if (operation.halves) features.insert("begin_backward()");
  if (operation.action == Action::kFreeze && operation.set != 0) features.insert("freeze several");
  if (!is_backward(operation.action)) return;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (operation.samples[r] == 0) features.insert("empty batch");
    if (operation.samples[r] != operation.samples[0]) features.insert("uneven batches");
    if (operation.unused[r] != 0) features.insert("unused parameters");
    if (operation.unused[r] != operation.unused[0]) features.insert("unused on some ranks");
  }
}

}  // namespace

std::vector<int> machines_of(const Program& program) {
  std::vector<int> machines;
  for (int rank = 0; rank < program.ranks; ++rank)
    machines.push_back(program.in_turn ? rank % program.machines : rank * program.machines / program.ranks);
  return machines;
}
std::string name_of(Action action) { return kActions[static_cast<size_t>(action)]; }
std::string name_of(Layout layout) { return kLayouts[static_cast<size_t>(layout)]; }
std::string name_of(Rule rule) { return kRules[static_cast<size_t>(rule)]; }

std::string text_of(const Program& program) {
  std::ostringstream out;
  out << "seed " << program.seed << ", " << program.ranks << " ranks" << (program.processes ? ", processes" : "");
  if (program.machines > 1) {
    out << " on machines";
    for (const int machine : machines_of(program)) out << ' ' << machine;
  }
  out << '\n';
  for (size_t i = 0; i < program.trainers.size(); ++i) {
    out << "  trainer " << i << ": ";
    describe(out, program.trainers[i], program.ranks);
    out << '\n';
  }
  for (const Operation& operation : program.operations) {
    out << "    ";
    describe(out, operation, program.ranks);
    out << '\n';
  }
  return out.str();
}

std::vector<std::string> features_of(const Program& program) {
  std::set<std::string> features{std::to_string(program.ranks) + (program.ranks == 1 ? " rank" : " ranks")};
  features.insert(program.processes ? "ranks are processes" : "ranks are threads");
  if (program.machines > 1) features.insert(std::to_string(program.machines) + " machines");
  if (program.trainers.size() > 1) features.insert("two trainers");
  for (const TrainerPlan& plan : program.trainers) features_of(plan, program.ranks, features);
  for (const Operation& operation : program.operations) features_of(operation, program.ranks, features);
  return {features.begin(), features.end()};
}

}  // namespace lockstep::fuzz
