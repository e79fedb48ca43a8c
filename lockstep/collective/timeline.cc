// SPDX-License-Identifier: Apache-2.0
#include "lockstep/timeline.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "lockstep/base/host_name.h"
#include "lockstep/base/log.h"
#include "lockstep/base/own_process.h"
#include "lockstep/base/text.h"
#include "lockstep/base/timeline_file.h"
#include "lockstep/base/trace.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// ---- Clocks

constexpr int kRounds = 20;

// The round trip that took the shortest tells most: rank 0 answered within it.
trace::ClockOffset ask_rank_0(const World& world) {
  trace::ClockOffset best;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const torch::Tensor theirs = torch::zeros({1}, torch::kInt64);
    const std::int64_t asked = trace::now();
    world.send(theirs, 0);
    world.receive(theirs, {.from = 0});
    const std::int64_t took = trace::now() - asked;
    if (took >= shortest) continue;
    shortest = took;
    best = {.at = asked + took / 2, .offset = theirs.item<std::int64_t>() - asked - took / 2};
  }
  return best;
}

void answer(const World& world, int rank) {
  const torch::Tensor time = torch::zeros({1}, torch::kInt64);
  for (int round = 0; round < kRounds; ++round) {
    world.receive(time, {.from = rank});
    time.fill_(trace::now());
    world.send(time, rank);
  }
}

// The ranks of rank 0's machine have its clock.
trace::ClockOffset compare_clocks(const World& world) {
  const torch::Tensor nodes = world.all_gather(torch::tensor({world.node_rank()}, torch::kInt64)).flatten();
  const auto elsewhere = [&](int rank) { return nodes[rank].item<std::int64_t>() != nodes[0].item<std::int64_t>(); };
  for (int rank = 1; rank < world.size() && world.rank() == 0; ++rank)
    if (elsewhere(rank)) answer(world, rank);
  return elsewhere(world.rank()) ? ask_rank_0(world) : trace::ClockOffset{.at = trace::now()};
}

std::int64_t start_of_job(const World& world) {
  const auto now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const torch::Tensor start = torch::tensor({static_cast<std::int64_t>(now)}, torch::kInt64);
  world.broadcast(start);
  return start.item<std::int64_t>();
}

trace::Process this_process(const World& world) {
  const trace::ClockOffset clock = compare_clocks(world);
  trace::Process process{.rank = world.rank(),
                         .pid = ::getpid(),
                         .ranks = world.size(),
                         .job = start_of_job(world),
                         .clock = {clock, clock}};
  host_name().copy(process.host.data(), process.host.size() - 1);
  return process;
}

// ---- Rings

torch::Tensor bytes_of(std::string& content) {
  return torch::from_blob(content.data(), {static_cast<std::int64_t>(content.size())}, torch::kUInt8);
}

Recordings receive_all(const World& world) {
  std::string content = trace::content();
  Recordings all{trace::parse(content, "the trace of rank 0")};
  for (int rank = 1; rank < world.size(); ++rank) {
    world.receive(bytes_of(content), {.from = rank});
    all.push_back(trace::parse(content, concat("the trace of rank ", rank)));
  }
  return all;
}

bool write_all_ranks(const World& world, const std::string& file) try {
  write_timeline(file, receive_all(world), /*complete=*/true);
  return true;
} catch (const SystemError& error) {
  log_warning(concat("the trace is not written, but `lockstep trace ", file,
                     "` can make it of what each rank leaves: ", error.what()));
  return false;
}

void open_ring(const World& world, const std::string& file) {
  require_timeline_file(file);
  trace::open(ring_file(file, world.rank()), this_process(world));
  show_operators();
}

}  // namespace

StepRange parse_steps(const std::string& text) {
  if (text.empty()) return {};
  const std::vector<std::string> ends = split(text, ':');
  int first = 0, end = 0;
  if (ends.size() == 2 && parse_int(ends[0], first) && parse_int(ends[1], end) && first >= 0 && end > first)
    return {first, end};
  throw UsageError({.what = concat("--trace-steps ", text, " is not a range of steps"),
                    .next = "give the first step and the one after the last, such as 100:120"});
}

Timeline::Timeline(const World& world, std::string file, StepRange steps)
    : world_(world), file_(std::move(file)), steps_(steps) {
  if (file_.empty()) return;
  open_ring(world, file_);
  trace::record(steps_.first == 0);
}

Timeline::~Timeline() {
  if (!file_.empty()) trace::close();
}

void Timeline::begin_step(std::int64_t step) {
  if (file_.empty()) return;
  trace::record(steps_.has(step));
  trace::count_memory();
}

void Timeline::finish(bool together) try {
  if (file_.empty()) return;
  trace::finish(together ? std::make_optional(compare_clocks(world_)) : std::nullopt);
  if (together) gather();
} catch (const PeerLost& error) {
  log_warning(concat("the trace is not complete: ", error.what()));
}

// The rings stay until the file is there.
void Timeline::gather() {
  const torch::Tensor written = torch::ones({1}, torch::kInt32);
  if (world_.rank() == 0) {
    if (!write_all_ranks(world_, file_)) written.zero_();
  } else {
    std::string content = trace::content();
    world_.send(bytes_of(content), 0);
  }
  world_.broadcast(written);
  std::error_code ignored;
  if (written.item<int>() != 0) std::filesystem::remove(ring_file(file_, world_.rank()), ignored);
}

void trace_if_asked(const World& world) {
  const char* const file = std::getenv("LOCKSTEP_TRACE");
  if (file == nullptr || *file == '\0' || trace::is_open()) return;
  open_ring(world, file);
  trace::record(true);
  static const OwnProcess process;  // a forked child does not finish for its parent
  std::atexit([] {
    if (process.is_here() && trace::is_open()) trace::finish({});
  });
}

}  // namespace lockstep
