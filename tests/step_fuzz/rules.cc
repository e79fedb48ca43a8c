// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/rules.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "tests/step_fuzz/meetings.h"

namespace lockstep::fuzz {
namespace {

using Causes = std::vector<std::string>;

const Causes kCallsDiffer{"left out a backward(), step()",
                          "backward() since the last exchange",
                          "called backward()",
                          "loss.backward() instead of ddp.backward()",
                          "the ranks differ",
                          "parameters written since the last exchange",
                          " wants ",
                          "step() number",
                          "the mean of the gradients",
                          "did not answer within"};  // with what every rank is doing, where they wait in two groups

// A mistake that makes the parameters of the ranks differ is found at the next exchange.
const Causes kParametersDiffer{"the parameters of rank", "parameters written since the last exchange"};

const char* const kMeanOfShards = "mean_gradients() with virtual shards";
const std::string kLeftOutBackward = "a backward() that some ranks leave out";

// What one rank has done to one trainer.
struct Rank {
  bool joined = false;
  double lr = 0, norm = 0, value = 0;
  double last_lr = 0;             // of the last parameter group
  double scale = 0;               // that its next step() divides by
  bool optimizer_scales = false;  // it knows the scale, from the first step() on: also in join()
  unsigned frozen = 0;
  int backwards = 0;       // since the last exchange; of shared gradients, since the last zero_grad()
  int samples = 0;         // in these
  int leading = 0;         // of these, those before the first with samples
  int unseen = 0;          // those without samples before them: a zero_grad() that drops no gradient is not seen
  bool published = false;  // of shared gradients: by the last backward(), since the last step()
  int written = 0;         // parameters written by hand, since the last exchange
  std::array<int, kMaxParameters>
      data{};            // how often each was written through .data(), since all ranks had the same values
  bool loaded = false;   // another state, which the other ranks may not have
  bool defined = false;  // .grad
  bool touched = false;  // .grad changed by hand since the exchange
  bool clipped = false;  // .grad of shared gradients changed by hand since zero_grad()
  int good_steps = 0;
};

// Walks through the operations of one trainer in one of its worlds.
class WorldOfTrainer {
 public:
  WorldOfTrainer(const Program& program, size_t trainer, int color)
      : program_(program), plan_(program.trainers[trainer]), trainer_(static_cast<int>(trainer)) {
    for (int rank = 0; rank < program.ranks; ++rank)
      if (plan_.color[static_cast<size_t>(rank)] == color) members_ |= 1U << rank;
    begin();
  }

  Judgement judge() {
    for (next_ = 0; next_ < program_.operations.size();) {
      const Operation& operation = program_.operations[next_++];
      if (operation.trainer != trainer_ || (operation.ranks & members_) == 0) continue;
      judge(operation, operation.ranks & members_);
      if (judgement_.verdict != Verdict::kLegal) return judgement_;
    }
    if (active() != members_) outside("a join() that some ranks never make");
    return judgement_;
  }

 private:
  void begin() {
    start_frozen_ = plan_.frozen;
    for_each(members_, [&](Rank& rank) {
      const unsigned frozen = begun_ ? rank.frozen : plan_.frozen;
      start_frozen_ = frozen;
      rank = {.lr = plan_.lr, .last_lr = plan_.lr, .scale = plan_.scaled ? 1024.0 : 0, .frozen = frozen};
    });
    begun_ = true;
    drift_ = own_way_ = tiny_ = has_state_ = false;
    stepped_ = stepped_since_exchange_ = exchanged_ = plain_ = stale_ = mean_ = mixed_ = partial_ = zeros_ = overflow_ =
        uneven_ = accumulates_ = data_written_ = made_ = false;
  }

  void judge(const Operation& operation, Ranks ranks) {
    if ((ranks & ~active()) != 0) return outside("an operation of a rank in join()");
    if ((operation.parameter == 5 || has(operation.set, 5)) && !plan_.words)
      return outside("an embedding that there is not");
    switch (operation.action) {
      case Action::kBackward:
      case Action::kNoSyncBackward:
      case Action::kPlainBackward: return backward(operation, ranks);
      case Action::kFailingForward: return;
      case Action::kFailingBackward: return failing_backward(operation, ranks);
      case Action::kOldGraph: return backward_of_old_graph(operation, ranks);
      case Action::kStep: return step(ranks);
      case Action::kZeroGrad:
      case Action::kZeroGradToZeros: return zero_grad(operation, ranks);
      case Action::kSetLr: return for_each(ranks, [&](Rank& rank) { rank.lr = rank.last_lr = operation.value; });
      case Action::kSetLastLr: return set_last_lr(operation, ranks);
      case Action::kLoadState: return load_state(ranks);
      case Action::kSetClipping: return clipping(ranks, [&](Rank& rank) { rank.norm = operation.value; });
      case Action::kSetValueClipping: return clipping(ranks, [&](Rank& rank) { rank.value = operation.value; });
      case Action::kMeanGradients: return mean_gradients(ranks);
      case Action::kClipNormByHand:
      case Action::kClipValueByHand: return clip_by_hand(operation, ranks);
      case Action::kFreeze: return freeze(operation, ranks);
      case Action::kUnfreeze: return for_each(ranks, [&](Rank& rank) { rank.frozen &= ~(1U << operation.parameter); });
      case Action::kKeepAverage: return keep_average();
      case Action::kLoadParameters: return load(ranks);
      case Action::kSave: return save(ranks);
      case Action::kResume: return saved_ ? load(ranks) : outside("a checkpoint that was never saved");
      case Action::kWriteParameter:
        own_way_ = own_way_ || pending();
        return for_each(ranks, [&](Rank& rank) { rank.written += 1; });
      case Action::kWriteData: return write_data(operation, ranks);
      case Action::kJoin: return join(ranks);
      case Action::kRebuild: return rebuild(ranks);
      case Action::kCount: return;
    }
  }

  // ---- Calls that all ranks make together

  void backward(const Operation& operation, Ranks ranks) {
    const bool plain = operation.action == Action::kPlainBackward, syncs = operation.action != Action::kNoSyncBackward;
    if (plan_.shards > 0 && operation.action != Action::kBackward) return outside("no_sync() with virtual shards");
    if (plan_.scaled && stale_) return outside("no zero_grad() after step() with loss scaling");
    if (any([](const Rank& rank) { return rank.backwards > 0; }) && plain != plain_) return mixed(operation, ranks);
    if (in_shared_memory(plan_) && mixed_) return illegal_mixture();
    if (in_shared_memory(plan_) && any([](const Rank& rank) { return rank.clipped; })) return illegal_clipping();
    if (plain && in_shared_memory(plan_) && ranks != active() && any([](const Rank& rank) { return rank.defined; }))
      return outside("loss.backward() on some ranks only, where others have a .grad, too");
    if (!in_shared_memory(plan_) && !syncs && mean_) return outside("no_sync() on top of a mean");
    if (plan_.shards > 0 && exchanged_) return illegal("a shard too many", {"call step() after the last shard"});
    if (operation.overflow != 0 && !plan_.scaled) return outside("an infinite loss without loss scaling");
    if (plan_.norm != Norm::kNone) normalise(operation, ranks);
    if (judgement_.verdict != Verdict::kLegal) return;
    if (plain && made_ && (exchanged_ || adds_to_mean()))
      return outside("loss.backward() after mean_gradients(), which is taken for a write by hand");
    if (adds_to_mean()) return illegal_addition();
    made_ = false;
    if (plain && in_shared_memory(plan_) && exchanged_) {
      if (ranks != active())
        return outside("loss.backward() on some ranks only, after a ddp.backward() without a step()");
      mixed_ = true;
    }
    plain_ = plain;
    if (!plain) accumulates_ = !syncs;
    int total = 0;
    for (int index = 0; index < program_.ranks; ++index) {
      if (!has(ranks, index)) continue;
      Rank& rank = ranks_[static_cast<size_t>(index)];
      int samples = 0;
      for (int shard = 0; shard < std::max(plan_.shards, 1); ++shard)
        samples += samples_of_shard(operation, index, shard);
      if (!syncs && samples == 0 && ranks != active()) return outside("an empty no_sync() on some ranks only");
      if (plain && samples == 0) return outside("loss.backward() of a rank without samples");
      rank.backwards += 1;
      rank.samples += samples;
      if (rank.samples == 0) rank.leading = rank.backwards;
      if (in_shared_memory(plan_) && zeros_ && rank.samples == 0 && rank.defined)
        return outside("gradients of zero on a rank without samples");
      if (samples > 0 && has(operation.overflow, index)) overflow_ = true;
      rank.touched = false;
      rank.published = rank.published && syncs;
      rank.defined = rank.defined || samples > 0;
      total += samples;
    }
    if (syncs) exchange(ranks);
    if (judgement_.verdict == Verdict::kLegal && total == 0) outside("no rank has samples");
  }

  // backward() of one kind after the other. loss.backward() is not seen at once.
  void mixed(const Operation& operation, Ranks ranks) {
    if (!in_shared_memory(plan_)) {
      if (members_ == (members_ & -members_)) return outside("backward() of both kinds in a world of one");
      if (ranks != active() || !any([](const Rank& rank) { return rank.samples > 0; }))
        return outside("backward() of both kinds on some ranks only");
      return illegal("loss.backward() after no_sync()", {"loss.backward() was called after ddp.backward()"});
    }
    if (ranks != active() || any([](const Rank& rank) { return !rank.joined && rank.samples == 0; }))
      return outside("backward() of both kinds on some ranks only");
    if (mixed_) return illegal_mixture();
    if (stale_ && operation.action == Action::kPlainBackward)
      return outside("loss.backward() after step() without zero_grad(), where ddp.backward() came before");
    mixed_ = true;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(ranks, rank) && operation.samples[static_cast<size_t>(rank)] == 0)
        return outside("backward() of both kinds, without samples");
    if (operation.action != Action::kPlainBackward) illegal_mixture();
  }

  void illegal_mixture() {
    illegal("backward() of both kinds in one step", {"that it has not counted", "was changed between backward() and"});
  }
  void illegal_clipping() { illegal(".grad changed by hand", {"was changed between backward() and step()"}); }

  void illegal_addition() {
    illegal("backward() on top of a mean", {"backward() would add to the mean", "that it has not counted"});
  }
  bool adds_to_mean() const {
    return made_ && !zeros_ && any([](const Rank& rank) { return rank.defined; });
  }

  // forward() of batch normalisation.
  void normalise(const Operation& operation, Ranks ranks) {
    std::set<int> samples;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(ranks, rank)) samples.insert(samples_of_shard(operation, rank, 0));
    if (plan_.norm == Norm::kOfRank) {
      if (samples.contains(1)) outside("a single sample has no variance");
      return;
    }
    if (ranks != members_ || samples.contains(0))
      return illegal("synchronised batch normalisation without a batch on some ranks", calls_differ(/*far=*/true));
    if (!equal_need_of_hidden(operation))
      return illegal("synchronised batch normalisation of what needs a gradient on some ranks only",
                     {"the input of SyncBatchNorm needs a gradient on"});
    uneven_ = uneven_ || samples.size() > 1;
    const bool several = any([](const Rank& rank) { return rank.backwards > 0; });
    if (uneven_ && (several || operation.action == Action::kPlainBackward))
      return outside("synchronised batch normalisation of uneven batches, not once per step");
    if (members_ == (members_ & -members_) && samples.contains(1)) outside("a single sample has no variance");
  }

  // Whether what is normalised needs a gradient on all ranks or on none: its backward() is collective.
  bool equal_need_of_hidden(const Operation& operation) const {
    std::set<bool> needs;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (!has(members_, rank)) continue;
      const unsigned unused = operation.unused[static_cast<size_t>(rank)];
      const unsigned frozen = ranks_[static_cast<size_t>(rank)].frozen;
      const bool words = plan_.words && (unused & 8) == 0 && !has(frozen, 5);
      needs.insert(!has(frozen, 0) || ((unused & 2) == 0 && !has(frozen, 1)) || words);
    }
    return needs.size() == 1;
  }

  void exchange(Ranks ranks) {
    if (plain_ && in_shared_memory(plan_)) return;  // the exchange is in step()
    if (ranks != active()) {
      return illegal(kLeftOutBackward, calls_differ(/*far=*/true));
    }
    if (joined() && exchanged_) return illegal("two exchanges in a step while a rank is in join()", calls_differ());
    if (any([&](const Rank& rank) { return (start_frozen_ & ~rank.frozen) != 0; })) return illegal_unfrozen();
    if (shares_parameters(plan_) && any([](const Rank& rank) { return rank.written > 0; })) {
      illegal_write();
      if (in_shared_memory(plan_)) return;
      require_equal_counts();
      return require_equal_settings();
    }
    exchanged_ = mean_ = true;
    for_each(ranks, [](Rank& rank) { rank.touched = false; });
    for_each(members_, [](Rank& rank) { rank.published = true; });
    if (in_shared_memory(plan_)) return;
    require_equal_counts();
    require_equal_settings();
    if (!shares_parameters(plan_) && !equal([](const Rank& rank) { return rank.written; }))
      illegal("a parameter written on some ranks only", {"parameters written since the last exchange"});
    require_same_parameters();
    stepped_since_exchange_ = uneven_ = data_written_ = false;
    for_each(members_, [&](Rank& rank) {
      rank.backwards = rank.samples = rank.leading = rank.unseen = 0;
      if (!shares_parameters(plan_)) rank.written = 0;
      rank.defined = true;
    });
  }

  // .grad becomes the mean, as an exchange in buckets leaves it. What was not exchanged is, as in step().
  void mean_gradients(Ranks ranks) {
    if (!in_shared_memory(plan_) || (plan_.shards == 0 && made_ && exchanged_)) return;  // it is there already
    if (plan_.shards > 0) return illegal("mean_gradients() with virtual shards", {kMeanOfShards});
    if (ranks != members_) return mean_of_some(ranks);
    if (exchanged_ && !equal([](const Rank& rank) { return rank.published; }))
      return illegal(kLeftOutBackward, calls_differ(/*far=*/true));
    if (any([](const Rank& rank) { return rank.written > 0; })) return illegal_write();
    require_summable();
    if (judgement_.verdict != Verdict::kLegal) return;
    if (!exchanged_ && start_unfrozen()) return illegal_unfrozen();
    const bool defined = any([](const Rank& rank) { return rank.defined; });
    for_each(members_, [&](Rank& rank) {
      rank.backwards = rank.samples = rank.leading = rank.unseen = 0;
      rank.defined = defined;
      rank.published = true;
    });
    made_ = exchanged_ = true;
    plain_ = zeros_ = false;
  }

  // The others wait in another call.
  void mean_of_some(Ranks ranks) {
    bool meets = false;
    see_next(active() & ~ranks, [&](const Operation& operation) {
      meets = meets || operation.action == Action::kMeanGradients;
      return !exchanges(operation) && operation.action != Action::kStep;
    });
    if (meets) return outside("mean_gradients() that meets a later one");
    illegal("a mean_gradients() that some ranks leave out", calls_differ(/*far=*/true));
  }

  void step(Ranks ranks) {
    const bool nothing = !any([](const Rank& rank) { return rank.defined; });
    if (ranks != active()) {
      if (plan_.layout == Layout::kTorch && nothing) return;  // it does nothing
      if (in_shared_memory(plan_) && plain_ && others_join(ranks))
        return outside("a join() after loss.backward() without a step()");
      if (made_anew_before_exchange()) return has(ranks, first()) ? make_step(nothing) : void();
      if (plan_.layout == Layout::kTorch &&
          (stepped_since_exchange_ || data_written_ || written_before_exchange() || steps_again()))
        return outside("a step() of torch's optimizer that some ranks leave out, beside other writes");
      return illegal("a step() that some ranks leave out", calls_differ());
    }
    if (in_shared_memory(plan_) && exchanged_ && !equal([](const Rank& rank) { return rank.published; }))
      return illegal(kLeftOutBackward, calls_differ(/*far=*/true));
    const bool pending = in_shared_memory(plan_) && any([](const Rank& rank) { return rank.samples > 0; });
    if (joined() && !exchanged_ && !plain_ && !pending) {
      if (plan_.layout == Layout::kTorch || nothing) return outside("a step() without a backward() beside a join()");
      return illegal("a step() without a backward() while a rank is in join()", calls_differ());
    }
    if (plan_.scaled && stale_ && !nothing) return outside("two step() with the same scaled gradient");
    if (plan_.shards > 0 && !exchanged_) return illegal("a step() without shards", {"step() before all of the"});
    make_step(nothing);
  }

  void make_step(bool nothing) {
    step_with_gradients();
    if (judgement_.verdict != Verdict::kLegal) return;
    if (!nothing) note_drift();
    stepped_ = stepped_since_exchange_ = true;
    has_state_ = has_state_ || !nothing;
    exchanged_ = false;
    stale_ = !nothing && plan_.shards == 0;
    if (!in_shared_memory(plan_)) plain_ = uneven_ = false;
    for_each(members_, [&](Rank& rank) {
      adjust_scale(rank);
      if (rank.joined || plan_.shards > 0) rank.backwards = rank.samples = rank.leading = rank.unseen = 0;
      if (rank.joined || plan_.shards > 0) rank.defined = false;
      if (plain_) rank.unseen = 0;
      rank.touched = rank.published = false;
    });
  }

  void step_with_gradients() {
    if (shares_parameters(plan_) && any([](const Rank& rank) { return rank.written > 0; })) return illegal_write();
    const bool touched = any([](const Rank& rank) { return rank.touched; });
    if (in_shared_memory(plan_) && !made_) {
      require_summable();
      if (judgement_.verdict == Verdict::kOutside) return;
    } else {
      if (any([](const Rank& rank) { return rank.backwards > 0; })) {
        if (shares_parameters(plan_) && any([](const Rank& rank) { return rank.samples > 0; }))
          return illegal("step() before the gradients of no_sync() were exchanged", {"that were not exchanged"});
        return outside("step() before the gradients of no_sync() were exchanged");
      }
      if (!equal([](const Rank& rank) { return rank.touched; }) && touched) {
        if (!shares_parameters(plan_)) return outside("a mean that some ranks change");
        return illegal("a mean that some ranks change", {"gradients written by hand"});
      }
    }
    if (in_shared_memory(plan_) && start_unfrozen()) illegal_unfrozen();
    if (plan_.layout == Layout::kTorch && set_before_exchange())
      return outside("a frozen parameter for some steps of torch's");
    require_equal_settings();
  }

  // Before ranks sum what each finds in the others' .grad.
  void require_summable() {
    if (mixed_) return illegal_mixture();
    if (any([](const Rank& rank) { return rank.touched || rank.clipped; })) return illegal_clipping();
    if (plain_ && any([](const Rank& rank) { return !rank.joined && rank.backwards == 0; }))
      illegal("a loss.backward() that some ranks leave out", calls_differ());
    if (plain_ && !equal([](const Rank& rank) { return rank.joined ? 0 : std::max(rank.backwards, 1) - 1; }))
      return outside("another number of loss.backward() on some ranks");
    if (!plain_) require_equal_counts();
    if (partial_ && judgement_.verdict == Verdict::kLegal) outside("zero_grad() on some ranks only");
  }

  void illegal_write() {
    illegal("a shared parameter written by hand",
            {"was written between two steps", "parameters written since the last exchange"});
    if (program_.machines > 1)
      judgement_.causes.insert(judgement_.causes.end(), kParametersDiffer.begin(), kParametersDiffer.end());
  }

  // It is found at the next exchange: another mistake that is made before that may be found first.
  void illegal_unfrozen() {
    illegal("a parameter that was frozen at first",
            {"requires a gradient, and did not when", "which parameters are frozen",
             "was changed between backward() and step()", "that it has not counted", "was written between two steps"});
  }

  bool start_unfrozen() const {
    return any([&](const Rank& rank) { return (start_frozen_ & ~rank.frozen) != 0; });
  }

  // As GradientScaler's documentation has it, with the options that rank.cc gives it.
  void adjust_scale(Rank& rank) {
    if (!plan_.scaled) return;
    rank.optimizer_scales = true;
    rank.good_steps = overflow_ ? 0 : rank.good_steps + 1;
    if (overflow_) rank.scale *= 0.5;
    if (rank.good_steps == 3) {
      rank.scale *= 2;
      rank.good_steps = 0;
    }
  }

  void zero_grad(const Operation& operation, Ranks ranks) {
    if (plan_.words && !in_shared_memory(plan_) && operation.action == Action::kZeroGradToZeros)
      return outside("a sparse mean without rows");
    if (plan_.shards > 0 && exchanged_) return outside("zero_grad() before step() with virtual shards");
    const bool any_gradient = any([](const Rank& rank) { return rank.defined; });
    if (ranks != active() && any_gradient) {
      bool empty = false;
      for_each(ranks, [&](const Rank& rank) { empty = empty || (rank.backwards > 0 && rank.samples == 0); });
      if (empty) return outside("zero_grad() on some ranks only, which had no samples");
      if (!in_shared_memory(plan_) || plan_.scaled || plan_.shards > 0 || plain_ || mixed_ || made_)
        return outside("zero_grad() on some ranks only");
      for_each(active(), [&](Rank& rank) {
        if (rank.samples == 0) rank.unseen += std::exchange(rank.backwards, 0);
      });
      partial_ = true;
    } else if (partial_) {
      if (exchanged_) return outside("zero_grad() on some ranks only");
      partial_ = false;
    }
    for_each(ranks, [&](Rank& rank) {
      rank.touched = rank.published && (rank.touched || rank.defined);
      rank.unseen = rank.samples > 0 ? 0 : rank.unseen + rank.backwards;
      rank.backwards = rank.samples = rank.leading = 0;
      rank.clipped = false;
      if (operation.action == Action::kZeroGrad) rank.defined = false;
    });
    zeros_ = operation.action == Action::kZeroGradToZeros;
    stale_ = overflow_ = mean_ = mixed_ = plain_ = uneven_ = false;
  }

  void join(Ranks ranks) {
    const bool used = stale_ && !in_shared_memory(plan_) && !accumulates_;  // what is in .grad, by a step()
    if (any([&](const Rank& rank) { return (rank.defined && !used) || rank.backwards > 0 || rank.written > 0; }) ||
        exchanged_)
      return outside("join() in the midst of a step");
    for_each(ranks, [](Rank& rank) {
      rank.joined = true;
      rank.defined = false;
    });
    if (active() == 0) {
      if (start_unfrozen()) return illegal_unfrozen();
      if (!in_shared_memory(plan_)) require_equal_settings();
      if (!shares_parameters(plan_)) require_same_parameters();
      for_each(members_, [](Rank& rank) {
        rank.joined = rank.published = false;
        rank.unseen = 0;
      });
      stale_ = mean_ = false;
    }
  }

  void load(Ranks ranks) {
    if (joined()) return outside("parameters_written() while a rank is in join()");
    if (ranks != active()) {
      Causes causes = calls_differ();
      if (shares_parameters(plan_)) causes.emplace_back("was written between two steps");  // by those that load
      return illegal("a parameters_written() that some ranks leave out", causes);
    }
    if (any([](const Rank& rank) { return rank.backwards > 0; }) && !(in_shared_memory(plan_) && exchanged_))
      return outside("parameters_written() between backward() and the exchange");
    if (differ()) return outside("parameters_written() after what the ranks did differently");
    for_each(ranks, [](Rank& rank) {
      rank.written = 0;
      rank.data = {};
    });
    data_written_ = false;
  }

  void save(Ranks ranks) {
    if (ranks != members_ || joined()) return outside("a checkpoint of some ranks");
    if (any([](const Rank& rank) { return rank.written > 0; }))
      return outside("a checkpoint of what was written by hand");
    if (differ()) return outside("a checkpoint of ranks that differ");
    saved_ = true;
  }

  void rebuild(Ranks ranks) {
    if (ranks != active() || joined()) return outside("a DistributedDataParallel made on some ranks only");
    if (any([](const Rank& rank) { return rank.defined || rank.written > 0 || rank.backwards > 0; }))
      return outside("a DistributedDataParallel made in the midst of a step");
    if (!equal([](const Rank& rank) { return rank.frozen; })) return outside("models that differ");
    if (differ()) return outside("a DistributedDataParallel made after what the ranks did differently");
    begin();
  }

  // ---- Calls that each rank makes by itself

  void failing_backward(const Operation& operation, Ranks ranks) {
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(ranks, rank) && !needs_first_layer(operation, rank)) return outside("a backward() that does not fail");
    illegal("a program that goes on after a failed backward()",
            {"thrown by the program in backward()", "that failed half-way", "in a step with as many shards",
             "that were not exchanged"});
    if (in_shared_memory(plan_) && plain_ && any([](const Rank& rank) { return rank.backwards > 0; }))
      illegal_mixture();
    if (adds_to_mean()) illegal_addition();
    // forward() waits, and so does the first exchange.
    if (plan_.norm == Norm::kSynchronised && ranks != members_) illegal("", kCallsDiffer);
    if (in_shared_memory(plan_) || ranks == active()) return;
    Causes causes = calls_differ();
    std::erase(causes, "did not answer within");  // it fails at once, then
    illegal("", causes);
  }

  void backward_of_old_graph(Operation operation, Ranks ranks) {
    if (plan_.layout == Layout::kTorch || plan_.shards > 0 || ranks != active() || joined())
      return outside("an old graph in special cases");
    operation.samples.fill(2);
    operation.overflow = 0;
    operation.action = Action::kBackward;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (!needs_first_layer(operation, rank)) return outside("a graph that needs no parameter");
    backward(operation, ranks);
    if (judgement_.verdict == Verdict::kLegal) step(ranks);
    if (judgement_.verdict != Verdict::kLegal) return;
    illegal("a graph that was made before a step()", {"modified by an inplace operation"});
  }

  bool needs_first_layer(const Operation& operation, int rank) const {
    return (operation.unused[static_cast<size_t>(rank)] & 2) == 0 &&
           (ranks_[static_cast<size_t>(rank)].frozen & 3) == 0;
  }

  void clipping(Ranks ranks, const auto& set) {
    if (plan_.layout == Layout::kTorch) return outside("set_clipping() of torch's optimizer");
    for_each(ranks, set);
  }

  void clip_by_hand(const Operation& operation, Ranks ranks) {
    if (plan_.scaled) return outside("clipping scaled gradients by hand");
    if (plan_.words && operation.action == Action::kClipValueByHand) return outside("clamping a sparse gradient");
    const bool pending = any([](const Rank& rank) { return rank.backwards > 0; });
    if (pending && (!in_shared_memory(plan_) || (plain_ && !exchanged_)))
      return outside("clipping before the exchange");
    if (operation.value > 1 || plan_.shards > 0) return;  // there is nothing to clip
    if (differ()) return outside("tiny gradients of ranks that differ");
    tiny_ = true;
    if (plan_.words && !in_shared_memory(plan_)) return outside("torch leaves sparse gradients as they are");
    if (in_shared_memory(plan_) && stale_ && !exchanged_) return outside("clipping after step()");
    if (in_shared_memory(plan_) && !plain_ && !made_)
      return for_each(ranks, [](Rank& rank) { rank.clipped = rank.samples > 0; });
    for_each(ranks, [](Rank& rank) { rank.touched = rank.touched || rank.defined; });
    if (!exchanged_ && any([](const Rank& rank) { return rank.touched; })) outside("clipping after step()");
  }

  void freeze(const Operation& operation, Ranks ranks) {
    if (has(frozen_by(operation), 2)) return outside("w2 frozen: every loss needs a parameter");
    for_each(ranks, [&](Rank& rank) { rank.frozen |= frozen_by(operation); });
  }

  void keep_average() {
    if (plan_.layout == Layout::kTorch || (!stepped_ && !shares_parameters(plan_)))
      return outside("keep_average() in time");
    illegal("keep_average() too late", {"keep_average() after the optimizer"});
  }

  void write_data(const Operation& operation, Ranks ranks) {
    if (shares_parameters(plan_)) return for_each(ranks, [](Rank& rank) { rank.written += 1; });
    if (ranks != active() && plan_.wide) return outside("a small part of large parameters");
    if (joined()) outside("a write while a rank is in join()");
    own_way_ = own_way_ || pending();
    data_written_ = true;
    for_each(ranks, [&](Rank& rank) { rank.data[static_cast<size_t>(operation.parameter)] += 1; });
  }

  // ---- Parameters of each rank that do not stay the same

  void set_last_lr(const Operation& operation, Ranks ranks) {
    if (ranks == active() || plan_.groups == 1) return outside("a learning rate of one group on all ranks");
    for_each(ranks, [&](Rank& rank) { rank.last_lr = operation.value; });
  }

  void load_state(Ranks ranks) {
    if (plan_.layout != Layout::kTorch || plan_.rule == Rule::kSGD || ranks == active() || joined() || !has_state_)
      return outside("a state that all ranks load, or that there is not");
    if (too_small_to_differ()) return outside("a state that changes little");
    if (plan_.wide) return outside("a difference in a part of the parameters that is compared some exchanges later");
    for_each(ranks, [](Rank& rank) { rank.loaded = true; });
  }

  // A step() with another learning rate or state, or beside other parameters.
  void note_drift() {
    if (shares_parameters(plan_)) return;
    const bool other_lr = plan_.layout == Layout::kTorch && !equal([](const Rank& rank) { return rank.lr; });
    if (other_lr && too_small_to_differ()) return outside("a learning rate that changes little");
    if ((other_lr || differ()) && !mean_) return outside("ranks that differ in a step() without gradients");
    drift_ = other_lr || differ();
  }
  bool differ() const {
    return drift_ || !equal([](const Rank& rank) { return rank.loaded; }) || data_differs();
  }
  bool data_differs() const {
    for (size_t i = 0; i < kMaxParameters; ++i)
      if (!equal([&](const Rank& rank) { return rank.data[i]; })) return true;
    return false;
  }
  bool too_small_to_differ() const { return plan_.dtype == torch::kBFloat16 || tiny_; }
  bool pending() const {
    return any([](const Rank& rank) { return rank.backwards > 0; });
  }

  void require_same_parameters() {
    if (plan_.layout == Layout::kTorch && !plan_.untold && !equal([](const Rank& rank) { return rank.lr; }))
      illegal("settings that differ: lr of torch's optimizer", {"lr of parameter group 0"});
    if (!drift_ && !data_differs()) return;
    if (own_way_ && judgement_.verdict == Verdict::kLegal) return outside("ranks that go their own way, and differ");
    illegal("parameters that differ between the ranks", kParametersDiffer);
  }

  // ---- What comes until the next exchange

  // Calls see(operation) with the operations of these ranks until it returns false.
  void see_next(Ranks ranks, const auto& see) const {
    for (size_t i = next_; i < program_.operations.size(); ++i) {
      const Operation& operation = program_.operations[i];
      if (operation.trainer == trainer_ && (operation.ranks & ranks) != 0 && !see(operation)) return;
    }
  }
  static bool exchanges(const Operation& operation) {
    return (is_backward(operation.action) && operation.action != Action::kNoSyncBackward) ||
           operation.action == Action::kJoin;
  }
  // far: until the step() after it, as a rank that leaves out a backward() goes on with that of the others.
  bool any_before_exchange(const auto& is, bool far = false) const {
    bool found = false, met = false;
    see_next(active(), [&](const Operation& operation) {
      found = found || is(operation.action);
      met = met || exchanges(operation);
      return far ? !met || operation.action != Action::kStep : !met;
    });
    return found;
  }
  bool written_before_exchange(bool far = false) const {
    const auto writes = [](Action action) {
      return action == Action::kWriteParameter || action == Action::kWriteData || action == Action::kLoadParameters ||
             action == Action::kResume;
    };
    return any([](const Rank& rank) { return rank.written > 0; }) || any_before_exchange(writes, far);
  }
  bool steps_again() const {
    return any_before_exchange([](Action action) { return action == Action::kStep; });
  }
  bool set_before_exchange() const {
    return any_before_exchange([](Action action) { return action == Action::kFreeze || action == Action::kUnfreeze; });
  }

  // Whether all ranks take the parameters of the first before it matters that they differ.
  bool made_anew_before_exchange() const {
    bool found = false;
    see_next(members_, [&](const Operation& operation) {
      found = operation.action == Action::kRebuild;
      return !found && !exchanges(operation) && operation.action != Action::kNoSyncBackward &&
             operation.action != Action::kSave && operation.action != Action::kKeepAverage &&
             operation.action != Action::kFailingBackward && operation.action != Action::kOldGraph;
    });
    return found && !shares_parameters(plan_) && !joined();
  }

  // Whether one that is not among these goes on with join().
  bool others_join(Ranks ranks) const {
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (!has(active() & ~ranks, rank)) continue;
      bool joins = false;
      see_next(1U << rank, [&](const Operation& operation) {
        joins = operation.action == Action::kJoin;
        return !exchanges(operation);
      });
      if (joins) return true;
    }
    return false;
  }

  // Whether a ddp.backward() of some rank comes before its zero_grad().
  bool adds_to_gradients() const {
    bool any = false;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      bool adds = false;
      see_next(active() & 1U << rank, [&](const Operation& operation) {
        adds = operation.action == Action::kBackward || operation.action == Action::kNoSyncBackward;
        return !adds && operation.action != Action::kZeroGrad && operation.action != Action::kZeroGradToZeros;
      });
      any = any || adds;
    }
    return any;
  }

  // Ranks that make different calls may come upon something else first that is illegal for one of them.
  Causes calls_differ(bool far = false) const {
    Causes causes = kCallsDiffer;
    const auto add = [&](bool possible, const char* cause) {
      if (possible) causes.emplace_back(cause);
    };
    const auto clips = [](Action action) {
      return action == Action::kZeroGrad || action == Action::kZeroGradToZeros || action == Action::kClipNormByHand ||
             action == Action::kClipValueByHand || action == Action::kPlainBackward;
    };
    add(shares_parameters(plan_) && written_before_exchange(far), "was written between two steps");
    add(in_shared_memory(plan_) && any_before_exchange(clips, far), "was changed between backward() and step()");
    add(!in_shared_memory(plan_) && shares_parameters(plan_) &&
            any([](const Rank& rank) { return rank.backwards > 0 && rank.samples > 0; }),
        "that were not exchanged");
    add(in_shared_memory(plan_) && plain_ && adds_to_gradients(), "that it has not counted");
    add(!in_shared_memory(plan_) && any([](const Rank& rank) { return rank.backwards > 0 && rank.samples > 0; }) &&
            any_before_exchange([](Action action) { return action == Action::kPlainBackward; }),
        "loss.backward() was called after ddp.backward()");
    add(made_, "backward() would add to the mean");
    add(plan_.shards > 0, kMeanOfShards);
    add(program_.machines > 1, "Timed out waiting");
    add(plan_.shards > 0, "step() before all of the");
    add(plan_.shards > 0, "call step() after the last shard");
    return causes;
  }

  // ---- What has to be equal

  // Of the ranks that have samples. Where a rank's first batches were empty, one that it leaves out may count as empty, too.
  void require_equal_counts() {
    std::set<int> counts;
    int least = 0, most = std::numeric_limits<int>::max();
    bool known = false;  // the number, by a rank that began with samples
    for_each(members_, [&](const Rank& rank) {
      if (rank.samples == 0) return;
      counts.insert(rank.backwards);
      least = std::max(least, rank.backwards - rank.leading);
      most = std::min(most, rank.backwards + rank.unseen);
      known = known || rank.leading + rank.unseen == 0;
    });
    if (counts.size() <= 1) return;
    if (least <= most && least == *counts.rbegin() && (known || in_shared_memory(plan_))) return;
    if (least <= most || (!known && !in_shared_memory(plan_)))
      return outside("empty batches that zero_grad() may have dropped");
    illegal("another number of backward() on some ranks", {"backward()"});
  }

  void require_equal_settings() {
    const auto require = [&](const auto& get, const std::string& name) {
      if (!equal(get)) illegal("settings that differ: " + name, {name, "a setting of the last step()"});
    };
    if (plan_.layout != Layout::kTorch) require([](const Rank& rank) { return rank.lr; }, "lr of parameter group 0");
    require([](const Rank& rank) { return rank.last_lr == rank.lr ? 0 : rank.last_lr; },
            "lr of parameter group " + std::to_string(plan_.groups - 1));
    if (judgement_.verdict == Verdict::kLegal && any([](const Rank& rank) { return rank.last_lr != rank.lr; }))
      outside("a learning rate of one group on all ranks");
    require([](const Rank& rank) { return rank.norm; }, "clipping by norm");
    require([](const Rank& rank) { return rank.value; }, "clipping by value");
    require([](const Rank& rank) { return rank.frozen; }, "which parameters are frozen");
    require([](const Rank& rank) { return rank.joined && !rank.optimizer_scales ? 0 : rank.scale; }, "the loss scale");
  }

  // ---- Helpers

  void for_each(Ranks ranks, const auto& each) {
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(ranks, rank)) each(ranks_[static_cast<size_t>(rank)]);
  }
  bool any(const auto& is) const {
    bool found = false;
    for (int rank = 0; rank < program_.ranks; ++rank)
      found = found || (has(members_, rank) && is(ranks_[static_cast<size_t>(rank)]));
    return found;
  }
  bool equal(const auto& get) const {
    std::set<double> values;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(members_, rank)) values.insert(static_cast<double>(get(ranks_[static_cast<size_t>(rank)])));
    return values.size() <= 1;
  }
  Ranks active() const {
    Ranks ranks = 0;
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (has(members_, rank) && !ranks_[static_cast<size_t>(rank)].joined) ranks |= 1U << rank;
    return ranks;
  }
  bool joined() const { return active() != members_; }
  int first() const { return std::countr_zero(members_); }

  void illegal(const std::string& rule, const Causes& causes) {
    judgement_.verdict = Verdict::kIllegal;
    if (judgement_.rule.empty()) judgement_.rule = rule;
    judgement_.causes.insert(judgement_.causes.end(), causes.begin(), causes.end());
    add_what_is_pending();
  }

  // What was illegal before, and has not shown yet, may show first.
  void add_what_is_pending() {
    const auto add = [&](bool pending, const char* cause) {
      if (pending) judgement_.causes.emplace_back(cause);
    };
    add(shares_parameters(plan_) && any([](const Rank& rank) { return rank.written > 0; }),
        "was written between two steps");
    add(in_shared_memory(plan_) && any([](const Rank& rank) { return rank.touched || rank.clipped; }),
        "was changed between backward() and step()");
    add(start_unfrozen(), "requires a gradient, and did not when");
    if (differ()) judgement_.causes.insert(judgement_.causes.end(), kParametersDiffer.begin(), kParametersDiffer.end());
  }
  void outside(const std::string& rule) { judgement_ = {Verdict::kOutside, rule}; }

  const Program& program_;
  const TrainerPlan& plan_;
  int trainer_;
  Ranks members_ = 0;
  std::array<Rank, kMaxRanks> ranks_{};
  size_t next_ = 0;  // operation
  bool begun_ = false;
  unsigned start_frozen_ = 0;
  bool stepped_ = false;  // ever
  bool saved_ = false;
  bool uneven_ = false;  // batches of other sizes on some ranks, since the last exchange
  bool stepped_since_exchange_ = false;
  bool exchanged_ = false;     // since the last step
  bool plain_ = false;         // the last backward() was loss.backward()
  bool partial_ = false;       // zero_grad() on some ranks only, in shared memory, and none on all since
  bool made_ = false;          // mean_gradients(), until the next backward()
  bool mixed_ = false;         // loss.backward() after ddp.backward(), in shared memory
  bool stale_ = false;         // no zero_grad() since the last step
  bool mean_ = false;          // no zero_grad() since the last exchange
  bool zeros_ = false;         // in .grad, by zero_grad(false)
  bool overflow_ = false;      // in .grad
  bool accumulates_ = false;   // the last ddp.backward() was under no_sync()
  bool data_written_ = false;  // through .data(), since the last exchange
  bool drift_ = false;         // parameters of each rank are no longer the same
  bool own_way_ = false;       // they were written between a no_sync() and its exchange: not compared any more
  bool tiny_ = false;          // gradients were clipped by hand
  bool has_state_ = false;     // the optimizer has made a step
  Judgement judgement_;
};

// Where ranks have parameters of their own, a backward() that some of them leave out may meet their next one.
Judgement judge(const Program& program, size_t trainer, int color) {
  const Judgement judgement = WorldOfTrainer(program, trainer, color).judge();
  if (judgement.rule != kLeftOutBackward || shares_parameters(program.trainers[trainer])) return judgement;
  const auto other = as_ranks_meet(program, trainer, color);
  if (!other) return judgement;
  Judgement of_other = WorldOfTrainer(*other, trainer, color).judge();
  if (of_other.verdict == Verdict::kIllegal)
    of_other.causes.insert(of_other.causes.end(), judgement.causes.begin(), judgement.causes.end());
  return of_other;
}

}  // namespace

// Illegal in any world of any trainer is illegal. What comes after it is not judged, so nothing is outside of the rules
// there.
Judgement judge(const Program& program) {
  Judgement all;
  for (size_t trainer = 0; trainer < program.trainers.size(); ++trainer) {
    const auto& color = program.trainers[trainer].color;
    for (const int each : std::set<int>(color.begin(), color.begin() + program.ranks)) {
      const Judgement one = judge(program, trainer, each);
      if (one.verdict == Verdict::kOutside) return one;
      if (one.verdict == Verdict::kLegal) continue;
      all.verdict = Verdict::kIllegal;
      all.rule = one.rule;
      all.causes.insert(all.causes.end(), one.causes.begin(), one.causes.end());
    }
  }
  return all;
}

Program as_executed(const Program& program, size_t trainer, int color) {
  const Judgement judgement = WorldOfTrainer(program, trainer, color).judge();
  if (judgement.rule != kLeftOutBackward || shares_parameters(program.trainers[trainer])) return program;
  return as_ranks_meet(program, trainer, color).value_or(program);
}

}  // namespace lockstep::fuzz
