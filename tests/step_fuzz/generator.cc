// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/generator.h"

#include <algorithm>
#include <bit>
#include <random>

#include "tests/step_fuzz/rules.h"

namespace lockstep::fuzz {
namespace {

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) { program_.seed = seed; }

  Program program() {
    program_.ranks = pick({1, 2, 2, 2, 3, 3, 4, 5});
    program_.processes = chance(0.15);
    if (!program_.processes && program_.ranks > 1 && chance(0.2)) {
      program_.machines = between(2, std::min(program_.ranks, 3));
      program_.in_turn = chance(0.5);
    }
    const int trainers = chance(0.2) ? 2 : 1;
    for (int i = 0; i < trainers; ++i) program_.trainers.push_back(plan());
    const int steps = between(1, 6);
    for (int i = 0; i < steps; ++i) a_step(between(0, trainers - 1));
    if (chance(0.4)) spoil();
    for (int i = 0; i < trainers; ++i)
      if (chance(0.2)) join(i);
    for (int i = 0; i < trainers; ++i)
      for (size_t k = 0; k < kEnd; k += 3) plain_step(i);
    return program_;
  }

 private:
  // ---- Trainers

  TrainerPlan plan() {
    TrainerPlan plan;
    plan.layout =
        pick({Layout::kShared, Layout::kShared, Layout::kSharedThroughBuckets, Layout::kSeparate, Layout::kTorch});
    if (program_.machines > 1 && plan.layout == Layout::kShared) plan.layout = Layout::kSharedThroughBuckets;
    plan.rule =
        pick({Rule::kSGD, Rule::kMomentum, Rule::kNesterov, Rule::kAdam, Rule::kAdamW, Rule::kLAMB, Rule::kLARS});
    if (plan.layout == Layout::kTorch && is_layerwise(plan)) plan.rule = Rule::kMomentum;
    plan.dtype = pick({torch::kFloat64, torch::kFloat64, torch::kFloat32, torch::kFloat32, torch::kBFloat16});
    plan.lr = plan.rule == Rule::kAdam || plan.rule == Rule::kAdamW || plan.rule == Rule::kLAMB ? 0.01 : 0.05;
    if (chance(0.3)) plan.weight_decay = 0.01;
    const bool own = plan.layout != Layout::kTorch;
    if (own && chance(0.2)) plan.average = 0.75;
    if (own && chance(0.2)) plan.scaled = true;
    if (plan.layout == Layout::kShared && chance(0.15)) plan.shards = between(1, 3);
    if (plan.layout != Layout::kShared) through_buckets(plan);
    plan.wide = chance(0.1);
    plan.buffers = chance(0.2);
    if (chance(0.15)) embed(plan);
    if (chance(0.15) && plan.shards == 0 && plan.dtype != torch::kBFloat16)
      plan.norm = chance(0.5) && !keeps_residual(plan) ? Norm::kSynchronised : Norm::kOfRank;
    plan.alike = chance(0.2) && plan.shards == 0 && plan.norm != Norm::kSynchronised;
    if (chance(0.15)) plan.frozen = chance(0.5) ? some_set(plan) : 1U << some_parameter(plan);
    if (own && chance(0.1)) plan.groups = between(12, 40);
    if (!own) plan.untold = chance(0.5);
    if (chance(0.15))
      for (int& color : plan.color) color = between(0, 1);
    else if (program_.machines > 1 && plan.layout == Layout::kSharedThroughBuckets)
      plan.mean_in_grad = chance(0.5);
    for (int& order : plan.destruction) order = between(0, 5);
    return plan;
  }

  void through_buckets(TrainerPlan& plan) {
    plan.small_buckets = chance(0.3);
    plan.bucket_view = chance(0.2);
    if (chance(0.3)) hook(plan);
  }

  // In 16 bits too many choices of what is sent hang on rounding; scales and residuals do not go together
  // (docs/step-rules.md).
  void hook(TrainerPlan& plan) {
    plan.hook = pick({Hook::kTopKOfAll, Hook::kFloat16, Hook::kBFloat16, Hook::kTopK, Hook::kTwoBit, Hook::kPowerSGD});
    if (plan.hook == Hook::kTopKOfAll) plan.scaled = false;  // it is refused, though it leaves nothing behind
    if (!keeps_residual(plan)) {
      if (plan.scaled && plan.hook == Hook::kFloat16) plan.hook = Hook::kBFloat16;
      return;
    }
    plan.scaled = false;
    if (plan.dtype == torch::kBFloat16) plan.dtype = torch::kFloat32;
  }

  // Sparse gradients, where torch's optimizers take them.
  void embed(TrainerPlan& plan) {
    plan.words = true;
    if (plan.layout != Layout::kTorch) return;
    if (plan.rule == Rule::kAdam || plan.rule == Rule::kAdamW) plan.rule = Rule::kSGD;
    plan.weight_decay = 0;
  }

  int some_parameter(const TrainerPlan& plan) {
    const int parameter = pick({0, 1, 3, 4, 5});
    return parameter == 5 && !plan.words ? 4 : parameter;
  }

  unsigned some_set(const TrainerPlan& plan) {
    unsigned set = 0;
    for (int i = between(1, 4); i > 0; --i) set |= 1U << some_parameter(plan);
    return set;
  }

  // ---- Steps

  Operation& add(Action action, int trainer) {
    program_.operations.push_back(make(action, trainer));
    return program_.operations.back();
  }

  Operation make(Action action, int trainer) {
    Operation operation{.action = action, .trainer = trainer, .ranks = all_of(program_.ranks) & ~joined_, .id = ++id_};
    operation.parameter = some_parameter(plan_of(trainer));
    for (auto& samples : operation.samples) samples = 3;
    return operation;
  }

  void a_step(int trainer) {
    while (chance(0.3)) something_else(trainer);
    const double kind = fraction();
    const bool shards = plan_of(trainer).shards > 0;
    if (!shards && kind < 0.2) {
      for (int i = between(1, 2); i > 0; --i) batches(add(Action::kNoSyncBackward, trainer));
    } else if (!shards && kind < 0.3) {
      batches(add(Action::kBackward, trainer));
    }
    if (!shards && kind > 0.9) {
      Operation& operation = add(Action::kPlainBackward, trainer);
      unused(operation);
      for (auto& samples : operation.samples) samples = between(plan_of(trainer).norm == Norm::kNone ? 1 : 2, 4);
      if (plan_of(trainer).norm == Norm::kSynchronised) operation.samples.fill(3);
    } else {
      batches(add(Action::kBackward, trainer));
    }
    if (chance(0.25)) mean_gradients(trainer);
    while (chance(0.15)) something_else(trainer);
    if (chance(0.9)) add(Action::kStep, trainer);
    const bool to_none = chance(0.7) || (plan_of(trainer).words && !in_shared_memory(plan_of(trainer)));
    if (chance(0.95)) add(to_none ? Action::kZeroGrad : Action::kZeroGradToZeros, trainer);
  }

  // Makes clipping by hand legal in every layout.
  void mean_gradients(int trainer) {
    if (plan_of(trainer).shards > 0 && chance(0.8)) return;
    add(Action::kMeanGradients, trainer);
    if (chance(0.7))
      set_value(add(pick({Action::kClipNormByHand, Action::kClipNormByHand, Action::kClipValueByHand}), trainer));
  }

  void plain_step(int trainer) {
    add(Action::kBackward, trainer);
    add(Action::kStep, trainer);
    add(Action::kZeroGrad, trainer);
  }

  // Sizes and branches that may differ between ranks.
  void batches(Operation& operation) {
    unused(operation);
    const TrainerPlan& plan = plan_of(operation.trainer);
    for (auto& samples : operation.samples) samples = between(plan.norm == Norm::kSynchronised ? 1 : 0, 4);
    if (plan.norm == Norm::kOfRank)
      for (auto& samples : operation.samples) samples += samples == 1 ? 1 : 0;
    if (plan.scaled && chance(0.2)) operation.overflow = some_ranks();
    if (chance(0.3)) operation.samples.fill(between(plan.norm == Norm::kNone ? 1 : 2, 4));
    operation.halves = chance(0.2);
  }

  void unused(Operation& operation) {
    if (!chance(0.25)) return;
    const bool same = chance(0.3);
    const int most = plan_of(operation.trainer).words ? 15 : 7;
    const auto of_all = static_cast<unsigned>(between(0, most));
    for (unsigned& branches : operation.unused) branches = same ? of_all : static_cast<unsigned>(between(0, most));
  }

  void something_else(int trainer) {
    const Action action =
        pick({Action::kSetLr,         Action::kSetLr,         Action::kSetClipping,    Action::kSetValueClipping,
              Action::kMeanGradients, Action::kMeanGradients, Action::kClipNormByHand, Action::kClipValueByHand,
              Action::kFreeze,        Action::kUnfreeze,      Action::kLoadParameters, Action::kSave,
              Action::kSave,          Action::kResume,        Action::kResume,         Action::kWriteParameter,
              Action::kWriteData,     Action::kRebuild,       Action::kFailingForward, Action::kStep,
              Action::kZeroGrad});
    Operation& operation = add(action, trainer);
    if (action == Action::kFailingForward) operation.ranks = some_ranks();
    if (action == Action::kUnfreeze) choose_frozen(operation);
    if (action == Action::kFreeze && chance(0.5)) operation.set = some_set(plan_of(trainer));
    set_value(operation);
  }

  // Unfreezes what was frozen at first, if anything was.
  void choose_frozen(Operation& operation) {
    if (const unsigned frozen = plan_of(operation.trainer).frozen; frozen != 0)
      operation.parameter = std::countr_zero(frozen);
  }

  void set_value(Operation& operation) {
    switch (operation.action) {
      case Action::kSetLr:
      case Action::kSetLastLr: operation.value = pick({0.01, 0.02, 0.03}); return;
      case Action::kSetClipping: operation.value = pick({0.0, 0.05, 0.5, 100.0}); return;
      case Action::kSetValueClipping: operation.value = pick({0.0, 0.02, 1.0}); return;
      case Action::kClipNormByHand:
      case Action::kClipValueByHand: operation.value = pick({1e-6, 1e6}); return;
      default: return;
    }
  }

  // Some ranks run out of batches before others.
  void join(int trainer) {
    if (plan_of(trainer).norm == Norm::kSynchronised && chance(0.8)) return;
    joined_ = 0;
    for (int i = between(1, 3); i > 0; --i) {
      const Ranks now = some_ranks() & ~joined_;
      if (now == 0 || (now | joined_) == all_of(program_.ranks)) break;
      add(Action::kJoin, trainer).ranks = now;
      joined_ |= now;
      for (int k = between(0, 2); k > 0; --k) {
        if (chance(0.2)) batches(add(Action::kNoSyncBackward, trainer));
        batches(add(Action::kBackward, trainer));
        add(Action::kStep, trainer);
        add(Action::kZeroGrad, trainer);
      }
    }
    add(Action::kJoin, trainer);
    joined_ = 0;
  }

  // Makes the program illegal, or at least odd.
  void spoil() {
    auto& operations = program_.operations;
    const int at = between(0, static_cast<int>(operations.size()) - 1);
    Operation& chosen = operations[static_cast<size_t>(at)];
    const TrainerPlan& plan = plan_of(chosen.trainer);
    if ((plan.layout == Layout::kTorch || plan.groups > 1) && chance(0.6)) return spoil_optimizer(chosen.trainer);
    const double kind = fraction();
    if (kind < 0.5) {
      chosen.ranks = some_ranks();
      return;
    }
    if (kind < 0.6) {
      operations.erase(operations.begin() + at);
      return;
    }
    if (kind < 0.7) {
      operations.insert(operations.begin() + at, make(Action::kOldGraph, chosen.trainer));
      return;
    }
    Operation extra = make(
        pick({Action::kFailingBackward, Action::kKeepAverage, Action::kSetLr, Action::kSetClipping,
              Action::kSetValueClipping, Action::kFreeze, Action::kFreeze, Action::kUnfreeze, Action::kWriteParameter,
              Action::kWriteData, Action::kClipNormByHand, Action::kClipValueByHand, Action::kStep,
              Action::kNoSyncBackward, Action::kBackward, Action::kLoadParameters, Action::kMeanGradients}),
        chosen.trainer);
    set_value(extra);
    if (extra.action == Action::kFreeze) extra.set = some_set(plan_of(chosen.trainer));
    if (extra.action == Action::kUnfreeze) choose_frozen(extra);
    if (extra.action == Action::kFailingBackward) extra.value = between(0, 1);
    if (chance(0.7)) extra.ranks = some_ranks();
    operations.insert(operations.begin() + at, extra);
  }

  // Some ranks get another state, learning rate or parameter.
  void spoil_optimizer(int trainer) {
    const bool torchs = plan_of(trainer).layout == Layout::kTorch;
    Operation extra = make(torchs ? pick({Action::kLoadState, Action::kLoadState, Action::kSetLr, Action::kWriteData})
                                  : Action::kSetLastLr,
                           trainer);
    set_value(extra);
    extra.ranks = some_ranks();
    auto& operations = program_.operations;
    const auto count = static_cast<int>(operations.size());
    operations.insert(operations.begin() + between(count / 2, count - 1), extra);
  }

  const TrainerPlan& plan_of(int trainer) const { return program_.trainers[static_cast<size_t>(trainer)]; }

  // ---- Dice

  Ranks some_ranks() { return static_cast<Ranks>(between(1, static_cast<int>(all_of(program_.ranks)))); }
  bool chance(double probability) { return fraction() < probability; }
  double fraction() { return std::uniform_real_distribution<>()(random_); }
  int between(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }
  template <class T>
  T pick(std::initializer_list<T> among) {
    return *(among.begin() + between(0, static_cast<int>(among.size()) - 1));
  }

  std::mt19937_64 random_;
  Program program_;
  Ranks joined_ = 0;
  int id_ = 0;
};

// Leaves out what comes before the plain steps at the end. Returns whether something was left out.
bool shrink_once(Program& program, const std::function<bool(const Program&)>& fails) {
  const auto attempt = [&](Program simpler) {
    if (judge(simpler).verdict == Verdict::kOutside || !fails(simpler)) return false;
    program = std::move(simpler);
    return true;
  };
  bool any = false;
  const size_t end = kEnd * program.trainers.size();
  const auto removable = [&] { return program.operations.size() - end; };
  for (size_t size = std::max<size_t>(removable() / 2, 1); size > 0; size /= 2)
    for (size_t i = 0; i + size <= removable();) {
      Program without = program;
      without.operations.erase(without.operations.begin() + static_cast<ptrdiff_t>(i),
                               without.operations.begin() + static_cast<ptrdiff_t>(i + size));
      if (attempt(without))
        any = true;
      else
        ++i;
    }
  return any;
}

// Values that make a program shorter to read.
void simplify_values(Program& program, const std::function<bool(const Program&)>& fails) {
  const auto attempt = [&](const auto& change) {
    Program simpler = program;
    change(simpler);
    if (judge(simpler).verdict != Verdict::kOutside && fails(simpler)) program = std::move(simpler);
  };
  for (size_t i = 0; i < program.trainers.size(); ++i) {
    const auto with = [&](const auto& change) { attempt([&](Program& simpler) { change(simpler.trainers[i]); }); };
    with([](TrainerPlan& plan) { plan.rule = Rule::kSGD; });
    with([](TrainerPlan& plan) { plan.weight_decay = 0; });
    with([](TrainerPlan& plan) { plan.dtype = torch::kFloat64; });
    with([](TrainerPlan& plan) { plan.average = 0; });
    with([](TrainerPlan& plan) { plan.scaled = false; });
    with([](TrainerPlan& plan) { plan.shards = 0; });
    with([](TrainerPlan& plan) { plan.frozen = 0; });
    with([](TrainerPlan& plan) { plan.groups = 1; });
    with([](TrainerPlan& plan) { plan.untold = false; });
    if (program.trainers[i].mean_in_grad) with([](TrainerPlan& plan) { plan.color = {}; });
    with([](TrainerPlan& plan) { plan.destruction = {}; });
    with([](TrainerPlan& plan) { plan.wide = plan.buffers = plan.bucket_view = plan.small_buckets = false; });
    with([](TrainerPlan& plan) { plan.hook = Hook::kNone; });
    with([](TrainerPlan& plan) { plan.norm = Norm::kNone; });
    with([](TrainerPlan& plan) { plan.words = false; });
    with([](TrainerPlan& plan) { plan.alike = false; });
  }
  attempt([](Program& simpler) { simpler.processes = false; });
  if (std::ranges::all_of(program.trainers, &TrainerPlan::mean_in_grad))
    attempt([](Program& simpler) { simpler.machines = 1; });
  for (size_t i = 0; i < program.operations.size(); ++i) {
    attempt([&](Program& simpler) { simpler.operations[i].unused = {}; });
    attempt([&](Program& simpler) { simpler.operations[i].samples.fill(3); });
    attempt([&](Program& simpler) { simpler.operations[i].overflow = 0; });
    attempt([&](Program& simpler) { simpler.operations[i].halves = false; });
  }
  for (const int ranks : {1, 2, 3, 4})
    if (ranks < program.ranks && ranks >= program.machines)
      attempt([&](Program& simpler) {
        simpler.ranks = ranks;
        for (Operation& operation : simpler.operations) operation.ranks &= all_of(ranks);
      });
}

}  // namespace

Program random_program(uint64_t seed) {
  for (uint64_t attempt = 0;; ++attempt) {
    Program program = Generator(seed + (attempt << 40)).program();
    program.seed = seed;
    if (judge(program).verdict != Verdict::kOutside) return program;
  }
}

Program shortest(Program program, const std::function<bool(const Program&)>& fails) {
  while (shrink_once(program, fails)) {
  }
  simplify_values(program, fails);
  while (shrink_once(program, fails)) {
  }
  return program;
}

}  // namespace lockstep::fuzz
