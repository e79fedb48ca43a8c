// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/run_facts.h"

#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "lockstep/base/host_name.h"
#include "lockstep/base/proc_file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

Json machine() {
  return {{"host", host_name()},
          {"cpu", proc_value("/proc/cpuinfo", "model name")},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE)}};
}

constexpr std::array kFacts = {
    "rank",           "node",         "forward_seconds", "backward_seconds", "exchange_seconds",
    "update_seconds", "data_seconds", "pss_bytes",       "peak_rss_bytes"};

}  // namespace

std::string for_shell(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quotes = "'";
  for (const char letter : word) quotes += letter == '\'' ? std::string(R"('\'')") : std::string(1, letter);
  return quotes + "'";
}

std::string command_of(int argc, const char* const* argv) {
  std::string program = argv[0];
  program.erase(program.find_last_not_of(' ') + 1);  // room for the rank (base/process_title.h)
  std::vector<std::string> words = split(program, ' ');
  words.insert(words.end(), argv + 1, argv + argc);
  for (std::string& word : words) word = for_shell(word);
  return join(words, " ");
}

Json start_event(const TrainOptions& options, std::int64_t step) {
  return {{"event", "start"},
          {"format", kMetricsFormat},
          {"step", step},  // that comes next: what an earlier attempt wrote of it and of later ones is void
          {"command", options.command},
          {"launcher", options.launcher},
          {"machine", machine()},
          {"settings", all_settings(options)}};
}

Json facts_of_each_rank(const World& together, const World& world, const PhaseTimes& phases, double data_seconds) {
  const auto mine = torch::tensor({static_cast<double>(world.rank()), static_cast<double>(world.node_rank()),
                                   phases.forward, phases.backward, phases.exchange, phases.update, data_seconds,
                                   proc_bytes("/proc/self/smaps_rollup", "Pss:"), proc_bytes("/proc/self/status", "VmHWM:")},
                                  torch::kFloat64);
  const torch::Tensor all = together.all_gather(mine);
  Json ranks = Json::array();
  for (const torch::Tensor& row : all.reshape({-1, mine.numel()}).unbind()) {
    Json facts;
    for (std::size_t i = 0; i < kFacts.size(); ++i) facts[kFacts[i]] = row[static_cast<std::int64_t>(i)].item<double>();
    for (const char* whole : {"rank", "node", "pss_bytes", "peak_rss_bytes"})
      facts[whole] = static_cast<std::int64_t>(facts[whole].get<double>());
    ranks.push_back(facts);
  }
  return ranks;
}

}  // namespace lockstep
