// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/slurm_arbiter.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <memory>

#include "lockstep/base/text.h"
#include "lockstep/launch/agreement.h"

namespace lockstep {
namespace {

std::string node_of(const std::string& host) { return host.substr(0, host.find('.')); }

std::string output_of(const std::string& command) {
  struct Close {
    void operator()(FILE* file) const { ::pclose(file); }
  };
  const std::unique_ptr<FILE, Close> pipe(::popen(command.c_str(), "r"));
  std::string output;
  std::array<char, 4096> room{};
  while (pipe != nullptr && std::fgets(room.data(), static_cast<int>(room.size()), pipe.get()) != nullptr)
    output += room.data();
  return output;
}

}  // namespace

// A star is sinfo's sign of a node that does not respond.
bool slurm_prefers(const std::string& lines, const std::vector<std::string>& here,
                   const std::vector<std::string>& lost) {
  std::map<std::string, bool> responds;
  for (const std::string& line : split(lines, '\n')) {
    const auto words = split(line, ' ');
    if (words.size() < 2) continue;
    const std::string& state = words[1];
    responds[words[0]] = !state.ends_with('*') && !state.starts_with("down") && !state.starts_with("power") &&
                         !state.starts_with("unknown");
  }
  const auto is = [&](bool alive) {
    return [&responds, alive](const std::string& host) {
      const auto found = responds.find(node_of(host));
      return found != responds.end() && found->second == alive;
    };
  };
  return std::ranges::all_of(here, is(true)) && std::ranges::all_of(lost, is(false));
}

std::string SlurmArbiter::answer(const ArbiterQuestion& question) {
  std::vector<std::string> nodes;
  for (const auto* side : {&question.here, &question.lost})
    for (const std::string& host : *side) nodes.push_back(node_of(host));
  const auto is_safe = [](const std::string& name) {  // in a shell
    return std::ranges::all_of(
        name, [](unsigned char letter) { return std::isalnum(letter) != 0 || letter == '-' || letter == '_'; });
  };
  if (!std::ranges::all_of(nodes, is_safe)) return "";
  const std::string lines = output_of(concat("sinfo -h -N -n ", join(nodes, ","), " -o '%N %T' 2>&1"));
  return slurm_prefers(lines, question.here, question.lost) ? Acceptor().answer(question.request) : "";
}

}  // namespace lockstep
