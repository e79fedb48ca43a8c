// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/plan/strategy_schedules.h"

namespace lockstep::plan {
namespace {

struct Turn {
  bool forward;
  int micro_batch;
};

// The order in which a stage works, as strategy/pipeline/stage.h has it.
std::vector<Turn> turns_of(PipelineSchedule order, int stage, int stages, int micro_batches) {
  const int ahead = order == PipelineSchedule::k1F1B ? std::min(stages - stage, micro_batches) : micro_batches;
  std::vector<Turn> turns;
  for (int i = 0; i < ahead; ++i) turns.push_back({true, i});
  for (int i = 0; i < micro_batches; ++i) {
    turns.push_back({false, i});
    if (ahead + i < micro_batches) turns.push_back({true, ahead + i});
  }
  return turns;
}

// Bytes of messages beside tensors and gradients.
constexpr double kDescription = 24 + 96 * 8, kSize = 24, kLoss = 16, kFlags = 8;

// Parameters that two stages use: these are taken to be the first and the last, as with an embedding that is also the head.
void share_gradients(Builder& b, double shared) {
  const int first = 0, last = b.devices() - 1;
  if (shared < 1 || first == last) return;
  const int there = b.machine_of(last), here = b.machine_of(first);
  for (const double bytes : {kFlags, shared}) {
    Ids ready = b.last(first);
    for (const int activity : b.last(last)) ready.push_back(activity);
    const Ids arrived{b.post(first, here, there, "shared", bytes, ready).arrived,
                      b.post(last, there, here, "shared", bytes, ready).arrived};
    b.follow(first, arrived);
    b.follow(last, arrived);
  }
}

}  // namespace

std::vector<std::vector<int>> stages_of(const Profile& profile, int stages) {
  const auto pieces = static_cast<int>(profile.pieces.size());
  // best[s][end]: the slowest of s stages that share the pieces before `end`, at best.
  std::vector best(at(stages + 1), std::vector<double>(at(pieces + 1), 1e300));
  std::vector begins(at(stages + 1), std::vector<int>(at(pieces + 1)));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s)
    for (int end = s; end <= pieces; ++end) {
      double last = 0;
      for (int begin = end - 1; begin >= s - 1; --begin) {
        last += profile.pieces[at(begin)].seconds;
        const double slowest = std::max(best[at(s - 1)][at(begin)], last);
        if (slowest >= best[at(s)][at(end)]) continue;
        best[at(s)][at(end)] = slowest;
        begins[at(s)][at(end)] = begin;
      }
    }
  std::vector<std::vector<int>> cut(at(stages));
  for (int s = stages, end = pieces; s > 0; --s) {
    const int begin = begins[at(s)][at(end)];
    for (int piece = begin; piece < end; ++piece) cut[at(s - 1)].push_back(piece);
    end = begin;
  }
  return cut;
}

void pipeline(Builder& b) {
  const Profile& profile = b.profile();
  const int stages = b.choice().stages,
            micro_batches = b.choice().order == PipelineSchedule::kNaive ? 1 : b.choice().micro_batches;
  const auto cut = stages_of(profile, stages);
  const double samples = static_cast<double>(b.target().batch) / micro_batches;
  const StepTimes times = b.alone(samples);
  double all = 0;
  for (const PieceTimes& piece : profile.pieces) all += piece.seconds;
  std::vector<double> share(at(stages)), bytes(at(stages)), output(at(stages));
  for (int stage = 0; stage < stages; ++stage)
    for (const int piece : cut[at(stage)]) {
      share[at(stage)] += profile.pieces[at(piece)].seconds / all;
      bytes[at(stage)] += static_cast<double>(profile.pieces[at(piece)].bytes);
      output[at(stage)] = profile.pieces[at(piece)].output_bytes * samples;
    }
  const bool processes = b.machines() > 1;
  // [stage][micro-batch]: what the next stage, or the one before, waits for. Turns are taken in rounds, so that what a turn
  // waits for has been added.
  std::vector<Ids> forward(at(stages), Ids(at(micro_batches), -1)), backward = forward;
  std::vector<std::vector<Turn>> turns;
  for (int stage = 0; stage < stages; ++stage)
    turns.push_back(turns_of(b.choice().order, stage, stages, micro_batches));
  std::vector<std::size_t> next(at(stages));
  // Gloo sends what the receiver has asked for, and a stage asks when it needs it: first for a description, then for the size of
  // the data, then for the data (strategy/pipeline/tensor_messages.h). So nothing arrives while it computes; and what it asks
  // goes behind what it is sending to the same stage, on one connection.
  std::map<std::pair<int, int>, int> left;  // [from, to] the newest data
  const auto receive = [&](int stage, int from, const std::string& name, double size, int sent) {
    if (!processes) return;  // threads pass on what they have
    Ids ready = b.last(stage);
    ready.push_back(sent);
    if (const auto before = left.find({stage, from}); before != left.end()) ready.push_back(before->second);
    for (const double bytes : {kDescription, kSize, size}) {
      const Builder::Message message = b.post(stage, b.machine_of(from), b.machine_of(stage), name, bytes, ready);
      left[{from, stage}] = message.left;
      ready = {message.arrived};
    }
    b.follow(stage, ready);
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int stage = 0; stage < stages; ++stage) {
      if (next[at(stage)] < turns[at(stage)].size()) {
        const auto [is_forward, k] = turns[at(stage)][next[at(stage)]];
        const int neighbour = is_forward ? stage - 1 : stage + 1;
        const bool alone = neighbour < 0 || neighbour == stages;
        const int waits_for = alone ? -1 : (is_forward ? forward : backward)[at(neighbour)][at(k)];
        if (!alone && waits_for < 0) continue;
        const double seconds = share[at(stage)] * (is_forward ? times.forward : times.backward);
        if (!alone)
          receive(stage, neighbour, is_forward ? "activations" : "gradients",
                  is_forward ? output[at(neighbour)] : output[at(stage)], waits_for);
        (is_forward ? forward : backward)[at(stage)][at(k)] =
            b.compute(stage, b.machine_of(stage), concat(is_forward ? "forward " : "backward ", k), seconds,
                      alone ? Ids{} : Ids{waits_for});
        ++next[at(stage)];
        moved = true;
      }
    }
  }
  if (!processes) {
    b.meet(b.all_devices(), b.handover());
    return update_together(b, 1);
  }
  const double whole = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  share_gradients(b, whole - b.parameter_bytes());
  sum_up(b, kLoss);
  for (int stage = 0; stage < stages; ++stage) b.update(stage, b.machine_of(stage), bytes[at(stage)] / whole);
}

}  // namespace lockstep::plan
