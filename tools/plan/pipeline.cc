// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/text.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "tools/plan/builder.h"

namespace lockstep::plan {
namespace {

// Bytes of messages beside tensors and gradients.
constexpr double kDescription = 24 + 96 * 8, kSize = 24, kLoss = 16, kFlags = 8;

// Parameters that two stages use: these are taken to be the first and the last, as with an embedding that is also the head.
void share_gradients(Builder& b, double shared) {
  const int first = 0, last = b.devices() - 1;
  if (shared < 1 || first == last) return;
  const int there = b.machine_of(last), here = b.machine_of(first);
  for (const double bytes : {kFlags, shared}) {
    Ids ready = b.last(first);
    append(ready, b.last(last));
    const Ids arrived{b.post(first, here, there, "shared", bytes, ready).arrived,
                      b.post(last, there, here, "shared", bytes, ready).arrived};
    b.follow(first, arrived);
    b.follow(last, arrived);
  }
}

// One step: what each stage does, in its order, and what it waits for.
class PlannedStep {
 public:
  explicit PlannedStep(Builder& b)
      : b_(b),
        stages_(b.choice.stages),
        micro_batches_(b.choice.parts_of_batch()),
        are_processes_(b.machines() > 1),
        times_(b.alone(samples())) {
    for (const PieceTimes& piece : b.profile.pieces) seconds_of_pieces_ += piece.seconds;
    for (const Ids& pieces : stages_of(b.profile, stages_)) add_stage(pieces);
  }

  void add() {
    // Turns are added in rounds: a turn comes after those that it waits for.
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < all_.size(); ++stage) moved |= take_turn(stage);
    }
    are_processes_ ? end_in_processes() : update_together(b_, 1.0 / stages_);
  }

 private:
  struct Stage {
    double share = 0;   // of the time of all stages
    double bytes = 0;   // of its parameters
    double output = 0;  // bytes, of a micro-batch
    IntVector<lockstep::PipelineStep> turns;
    int next = 0;
    Ids forward, backward;  // [micro-batch]: what the stage after it, or before it, waits for
  };

  double samples() const { return to_double(b_.target.batch) / micro_batches_; }

  void add_stage(const Ids& pieces) {
    Stage stage{.turns = steps_of_stage(b_.choice.order, all_.size(), stages_, micro_batches_),
                .forward = Ids(micro_batches_, -1),
                .backward = Ids(micro_batches_, -1)};
    for (const int index : pieces) {
      const PieceTimes& piece = b_.profile.pieces[to_size(index)];
      stage.share += piece.seconds / seconds_of_pieces_;
      stage.bytes += piece.bytes;
      stage.output = piece.output_bytes * samples();
    }
    all_.push_back(std::move(stage));
  }

  // Returns false if the stage has no turn left, or if the next one waits for an activity that has not been added yet.
  bool take_turn(int number) {
    Stage& stage = all_[number];
    if (stage.next == stage.turns.size()) return false;
    const auto [is_forward, micro_batch] = stage.turns[stage.next];
    const int neighbour = is_forward ? number - 1 : number + 1;
    const Stage* const other = neighbour >= 0 && neighbour < stages_ ? &all_[neighbour] : nullptr;
    const int sent = other == nullptr ? 0 : (is_forward ? other->forward : other->backward)[micro_batch];
    if (sent < 0) return false;
    const Ids after = other == nullptr ? Ids() : Ids{sent};
    if (other != nullptr && are_processes_)
      receive(number, neighbour, is_forward ? "activations" : "gradients", is_forward ? other->output : stage.output,
              sent);
    const double seconds = stage.share * (is_forward ? times_.forward : times_.backward);
    (is_forward ? stage.forward : stage.backward)[micro_batch] =
        b_.compute(number, concat(is_forward ? "forward " : "backward ", micro_batch), seconds, after);
    ++stage.next;
    return true;
  }

  // Gloo sends what the receiver has asked for, and a stage asks when it needs it: for a description, for the size of the data, for
  // the data (strategy/pipeline/tensor_messages.h). So nothing arrives while it computes; and its request goes behind its own data
  // to the same stage, on one connection.
  void receive(int stage, int from, const std::string& name, double bytes, int sent) {
    Ids ready = b_.last(stage);
    if (const auto before = left_.find({stage, from}); before != left_.end()) ready.push_back(before->second);
    const int here = b_.machine_of(stage), there = b_.machine_of(from);
    Ids after{sent};
    for (const double size : {kDescription, kSize, bytes}) {
      append(after, ready);
      const Builder::Message message = b_.post(stage, there, here, name, size, after);
      left_[{from, stage}] = message.left;
      ready = {message.arrived};
    }
    b_.follow(stage, ready);
  }

  void end_in_processes() {
    double bytes = 0;
    for (const Stage& stage : all_) bytes += stage.bytes;
    share_gradients(b_, bytes - b_.profile.parameter_bytes);
    sum_up(b_, kLoss);
    for (int stage = 0; stage < stages_; ++stage) b_.update(stage, all_[stage].bytes / bytes);
  }

  Builder& b_;
  const int stages_, micro_batches_;
  const bool are_processes_;
  const StepTimes times_;
  double seconds_of_pieces_ = 0;
  IntVector<Stage> all_;
  std::map<std::pair<int, int>, int> left_;  // [from, to] the newest data
};

}  // namespace

IntVector<Ids> stages_of(const Profile& profile, int stages) {
  std::vector<double> costs;
  for (const PieceTimes& piece : profile.pieces) costs.push_back(piece.seconds);
  IntVector<Ids> all;
  for (const Range& range : balanced_cut(costs, stages))
    all.push_back(consecutive(to_int(range.begin), to_int(range.size())));
  return all;
}

void pipeline(Builder& b) { PlannedStep(b).add(); }

}  // namespace lockstep::plan
