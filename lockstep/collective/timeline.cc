// SPDX-License-Identifier: Apache-2.0
#include "lockstep/timeline.h"

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>

#include "lockstep/base/log.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/process/own_process.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

// ---- Clocks

// A rank's clock beside rank 0's.
struct Clock {
  trace::ClockOffset offset;
  int64_t job = 0;  // when the job started, as rank 0 says: it tells the job's rings from those of an earlier one
};

// The ranks of rank 0's machine have its clock, and need one round to learn when the job started.
int rounds_with(const ClockPeers& peers, int rank) {
  return peers.machine_of[to_size(rank)] == peers.machine_of[0] ? 1 : 20;
}

// The round trip that took the shortest tells most: rank 0 answered within it.
Clock ask_rank_0(const ClockPeers& peers) {
  Clock clock;
  int64_t shortest = std::numeric_limits<int64_t>::max();
  const int rounds = rounds_with(peers, peers.rank);
  for (int round = 0; round < rounds; ++round) {
    const torch::Tensor answer = torch::zeros({2}, torch::kInt64);
    const int64_t asked = trace::now();
    peers.send(answer, 0);
    peers.receive(answer, 0);
    const int64_t took = trace::now() - asked, middle = asked + took / 2;
    if (took >= shortest) continue;
    shortest = took;
    clock = {{.at = middle, .offset = rounds == 1 ? 0 : answer[0].item<int64_t>() - middle}, answer[1].item<int64_t>()};
  }
  return clock;
}

Clock compare_clocks(const ClockPeers& peers) {
  if (peers.rank != 0) return ask_rank_0(peers);
  const int64_t start = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  for (int rank = 1; rank < std::ssize(peers.machine_of); ++rank)
    for (int round = 0; round < rounds_with(peers, rank); ++round) {
      const torch::Tensor message = torch::zeros({2}, torch::kInt64);
      peers.receive(message, rank);
      message[0] = trace::now();
      message[1] = start;
      peers.send(message, rank);
    }
  return {{.at = trace::now()}, start};
}

ClockPeers peers_in(const World& world) {
  return {.rank = world.rank(),
          .machine_of = numbers_in<int>(world.all_gather(torch::tensor({world.node_rank()}, torch::kInt32))),
          .send = [&world](const torch::Tensor& tensor, int to) { world.send(tensor, to); },
          .receive = [&world](const torch::Tensor& tensor, int from) { world.receive(tensor, {.from = from}); }};
}

void open_ring(const ClockPeers& peers, const std::string& file) {
  require_timeline_file(file);
  const auto [clock, job] = compare_clocks(peers);
  trace::Process process{.rank = peers.rank,
                         .pid = ::getpid(),
                         .ranks = std::ssize(peers.machine_of),
                         .job = job,
                         .clock = {clock, clock}};
  host_name().copy(process.host.data(), process.host.size() - 1);
  trace::open(ring_file(file, peers.rank), process);
}

// ---- Rings

torch::Tensor bytes_of(std::string& content) {
  return torch::from_blob(content.data(), {to_int64(content.size())}, torch::kUInt8);
}

// The rings stay until the file is there.
bool write_all_ranks(const World& world, const std::string& file) try {
  std::string content = trace::content();
  Recordings all{trace::parse(content, "the trace of rank 0")};
  for (int rank = 1; rank < world.size(); ++rank) {
    world.receive(bytes_of(content), {.from = rank});
    all.push_back(trace::parse(content, concat("the trace of rank ", rank)));
  }
  write_timeline(file, all, /*complete=*/true);
  return true;
} catch (const SystemError& error) {
  log_warning(concat("the trace is not written, but `lockstep trace ", file,
                     "` can make it of what each rank leaves: ", error.what()));
  return false;
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
  open_ring(peers_in(world), file_);
  trace::record(steps_.first == 0);
}

Timeline::~Timeline() {
  if (!file_.empty()) trace::close();
}

void Timeline::begin_step(int64_t step) {
  if (!file_.empty()) trace::record(steps_.has(step));
}

void Timeline::finish(bool together) try {
  if (file_.empty()) return;
  trace::record(false);  // before clocks are compared by messages
  trace::finish(together ? std::make_optional(compare_clocks(peers_in(world_)).offset) : std::nullopt);
  if (together) gather();
} catch (const PeerLost& error) {
  log_warning(concat("the trace is not complete: ", error.what()));
}

void Timeline::gather() {
  bool written = false;
  if (world_.rank() == 0) {
    written = write_all_ranks(world_, file_);
  } else {
    std::string content = trace::content();
    world_.send(bytes_of(content), 0);
  }
  const torch::Tensor is_written = torch::tensor({written ? 1 : 0}, torch::kInt32);
  world_.broadcast(is_written);
  std::error_code ignored;
  if (is_written.item<int>() != 0) std::filesystem::remove(ring_file(file_, world_.rank()), ignored);
}

void trace_if_asked(const std::function<ClockPeers()>& peers) {
  const char* const file = std::getenv("LOCKSTEP_TRACE");
  if (file == nullptr || *file == '\0' || trace::is_open()) return;
  open_ring(peers(), file);
  trace::record(true);
  static const OwnProcess process;  // a forked child does not finish for its parent
  std::atexit([] {
    if (process.is_here() && trace::is_open()) trace::finish({});
  });
}

void trace_if_asked(const World& world) {
  trace_if_asked([&] { return peers_in(world); });
}

}  // namespace lockstep
