// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/reports/run_facts.h"

#include <unistd.h>

#include <thread>
#include <vector>

#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/train/builtin.h"

namespace lockstep {
namespace {

Json machine() {
  return {{"host", host_name()},
          {"cpu", proc_value("/proc/cpuinfo", "model name")},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE)}};
}

}  // namespace

std::string command_of(int argc, const char* const* argv) {
  std::string program = argv[0];
  program.erase(program.find_last_not_of(' ') + 1);  // room for the rank (base/process/process_title.h)
  std::vector<std::string> words = split(program, ' ');
  words.insert(words.end(), argv + 1, argv + argc);
  for (std::string& word : words) word = for_shell(word);
  return join(words, " ");
}

Json start_event(const TrainOptions& options, std::int64_t step) {
  Json event = {{"event", "start"},
                {"format", kMetricsFormat},
                {"step", step},  // that comes next: what an earlier attempt wrote of it and of later ones is void
                {"command", options.command},
                {"launcher", options.launcher},
                {"machine", machine()},
                {"settings", all_settings(options)}};
  if (!options.fit.empty())
    if (const auto classes = fit_of(options.fit).data.classes; !classes.empty()) event["classes"] = classes;
  return event;
}

Json facts_of_each_rank(const World& together, const World& world, const PhaseTimes& phases, double data_seconds) {
  const auto bytes = [](const char* file, const char* name) {
    return static_cast<std::int64_t>(proc_bytes(file, name));
  };
  const Json mine = {{"rank", world.rank()},
                     {"node", world.node_rank()},
                     {"forward_seconds", phases.forward},
                     {"backward_seconds", phases.backward},
                     {"exchange_seconds", phases.exchange},
                     {"update_seconds", phases.update},
                     {"data_seconds", data_seconds},
                     {"pss_bytes", bytes("/proc/self/smaps_rollup", "Pss:")},
                     {"peak_rss_bytes", bytes("/proc/self/status", "VmHWM:")}};
  Json ranks = Json::array();
  for (const std::string& text : together.exchange_texts(mine.dump())) ranks.push_back(Json::parse(text));
  return ranks;
}

}  // namespace lockstep
