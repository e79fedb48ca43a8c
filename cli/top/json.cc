// SPDX-License-Identifier: Apache-2.0
#include "cli/top/json.h"

#include <chrono>

#include <nlohmann/json.hpp>

#include "lockstep/base/names.h"

namespace lockstep::top {
namespace {

using Object = nlohmann::ordered_json;

constexpr int kFormat = 1;

const char* state_of_process(const RankView& rank) {
  if (!rank.is_known()) return "unknown";
  if (rank.now.phase == Phase::kEnded) return "ended";
  if (rank.now.state == 0) return "died";
  return rank.now.state == 'T' || rank.now.state == 't' ? "stopped" : "running";
}

Object json_of(const Shares& shares) {
  return {{"compute", shares.compute}, {"wait", shares.wait},     {"exchange", shares.exchange},
          {"data", shares.data},       {"update", shares.update}, {"other", shares.other}};
}

Object json_of(const ServerView& server) {
  return {{"clients", server.clients},
          {"requests_in_hand", server.queue},
          {"requests_per_second", server.requests},
          {"seconds_per_request", server.ms / 1000},
          {"mean_delay", server.mean_delay},
          {"most_delay", server.most_delay}};
}

Object waits_for(const RankView& rank) {
  if (rank.now.wait_since == 0) return nullptr;
  return rank.waits_for ? Object(*rank.waits_for) : Object("any");
}

Object json_of(const RankView& rank) {
  Object object = {{"rank", rank.now.rank},
                   {"pid", rank.now.pid},
                   {"state", state_of_process(rank)},
                   {"phase", name_of(rank.now.phase)},
                   {"step", rank.now.step},
                   {"steps_per_second", rank.steps_per_second},
                   {"samples_per_second", rank.samples_per_second},
                   {"loss", rank.now.samples > 0 ? Object(rank.now.loss) : Object(nullptr)},
                   {"shares", json_of(rank.shares)},
                   {"own_code", rank.shares.own_code},
                   {"awaited", rank.awaited},
                   {"waits_for", waits_for(rank)},
                   {"without_core", rank.without_core},
                   {"seconds_since_progress", rank.seconds_since_progress},
                   {"memory_bytes", rank.now.resident_bytes},
                   {"private_bytes", rank.now.resident_bytes - rank.now.shared_bytes}};
  if (rank.server) object["server"] = json_of(*rank.server);
  return object;
}

Object json_of(const JobView& job) {
  Object object = {{"job", job.job.number},
                   {"name", job.job.name},
                   {"command", job.job.command},
                   {"seconds", job.seconds},
                   {"world_size", job.job.world_size},
                   {"machines", job.job.nodes},
                   {"machine", job.job.node_rank},
                   {"samples_per_second", job.samples_per_second},
                   {"verdicts", Object::array()},
                   {"ranks", Object::array()}};
  for (const Verdict& verdict : job.verdicts)
    object["verdicts"].push_back({{"kind", verdict.kind}, {"ranks", verdict.ranks}, {"text", verdict.text}});
  for (const RankView& rank : job.ranks) object["ranks"].push_back(json_of(rank));
  return object;
}

}  // namespace

std::string json_of(const std::vector<JobView>& jobs) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  Object object = {{"format", kFormat}, {"time", now.count()}, {"jobs", Object::array()}};
  for (const JobView& job : jobs) object["jobs"].push_back(json_of(job));
  return object.dump();
}

}  // namespace lockstep::top
