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
#include "lockstep/base/to_size.h"
#include "lockstep/base/trace.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/error.h"
#include "lockstep/launch/own_progress.h"

namespace lockstep {
namespace {

// ---- Clocks

constexpr int kRounds = 20;

// The round trip that took the shortest tells most: rank 0 answered within it.
trace::ClockOffset ask_rank_0(const ClockPeers& peers) {
  trace::ClockOffset best;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const torch::Tensor theirs = torch::zeros({1}, torch::kInt64);
    const std::int64_t asked = trace::now();
    peers.send(theirs, 0);
    peers.receive(theirs, 0);
    const std::int64_t took = trace::now() - asked;
    if (took >= shortest) continue;
    shortest = took;
    best = {.at = asked + took / 2, .offset = theirs.item<std::int64_t>() - asked - took / 2};
  }
  return best;
}

void answer(const ClockPeers& peers, int rank) {
  const torch::Tensor time = torch::zeros({1}, torch::kInt64);
  for (int round = 0; round < kRounds; ++round) {
    peers.receive(time, rank);
    time.fill_(trace::now());
    peers.send(time, rank);
  }
}

// The ranks of rank 0's machine have its clock.
trace::ClockOffset compare_clocks(const ClockPeers& peers) {
  const auto elsewhere = [&](int rank) { return peers.machine_of[to_size(rank)] != peers.machine_of[0]; };
  const int size = static_cast<int>(peers.machine_of.size());
  for (int rank = 1; rank < size && peers.rank == 0; ++rank)
    if (elsewhere(rank)) answer(peers, rank);
  return elsewhere(peers.rank) ? ask_rank_0(peers) : trace::ClockOffset{.at = trace::now()};
}

ClockPeers peers_in(const World& world) {
  const torch::Tensor nodes = world.all_gather(torch::tensor({world.node_rank()}, torch::kInt32)).flatten();
  return {.rank = world.rank(),
          .machine_of = {nodes.const_data_ptr<int>(), nodes.const_data_ptr<int>() + nodes.numel()},
          .send = [&world](const torch::Tensor& tensor, int to) { world.send(tensor, to); },
          .receive = [&world](const torch::Tensor& tensor, int from) { world.receive(tensor, {.from = from}); }};
}

// When the job started, as rank 0 says: it tells the job's rings from those of an earlier one.
std::int64_t start_of_job(const ClockPeers& peers) {
  const auto now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const torch::Tensor start = torch::tensor({static_cast<std::int64_t>(now)}, torch::kInt64);
  if (peers.rank != 0) peers.receive(start, 0);
  const int size = static_cast<int>(peers.machine_of.size());
  for (int rank = 1; rank < size && peers.rank == 0; ++rank) peers.send(start, rank);
  return start.item<std::int64_t>();
}

trace::Process this_process(const ClockPeers& peers) {
  const trace::ClockOffset clock = compare_clocks(peers);
  trace::Process process{.rank = peers.rank,
                         .pid = ::getpid(),
                         .ranks = static_cast<int>(peers.machine_of.size()),
                         .job = start_of_job(peers),
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

void open_ring(const ClockPeers& peers, const std::string& file) {
  require_timeline_file(file);
  trace::open(ring_file(file, peers.rank), this_process(peers));
}

void record(bool on) {
  trace::record(on);
  show_operators(on);
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
  own_progress::record_more = &show_operators;
  if (file_.empty()) return;
  open_ring(peers_in(world), file_);
  record(steps_.first == 0);
}

Timeline::~Timeline() {
  if (file_.empty()) return;
  show_operators(false);
  trace::close();
}

void Timeline::begin_step(std::int64_t step) {
  if (file_.empty()) return;
  record(steps_.has(step));
  trace::count_memory();
}

void Timeline::finish(bool together) try {
  if (file_.empty()) return;
  record(false);  // before clocks are compared by messages
  trace::finish(together ? std::make_optional(compare_clocks(peers_in(world_))) : std::nullopt);
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

namespace {

// The file of a trace that has not begun.
const char* asked_for() {
  const char* const file = std::getenv("LOCKSTEP_TRACE");
  return file == nullptr || *file == '\0' || trace::is_open() ? nullptr : file;
}

}  // namespace

void trace_if_asked(const World& world) {
  own_progress::record_more = &show_operators;
  if (asked_for() != nullptr) trace_if_asked(peers_in(world));
}

void trace_if_asked(const ClockPeers& peers) {
  own_progress::record_more = &show_operators;
  const char* const file = asked_for();
  if (file == nullptr) return;
  open_ring(peers, file);
  record(true);
  static const OwnProcess process;  // a forked child does not finish for its parent
  std::atexit([] {
    if (process.is_here() && trace::is_open()) trace::finish({});
  });
}

}  // namespace lockstep
