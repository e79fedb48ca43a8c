// SPDX-License-Identifier: Apache-2.0
// cli/compare/folder.h: the folder of a comparison, from which it is continued, and which `lockstep report` reads.
//
//   comparison.json          settings, machine, command, and each run with its state; written anew after every run
//   runs/NAME/metrics.jsonl  what `lockstep train --metrics` wrote
//   runs/NAME/output.txt     stdout and stderr of the run
//   runs/NAME/trace.json     with --trace
//
// Owns:    a lock on the folder: no other process continues the same comparison
// Threads: one
#pragma once

#include "cli/compare/training.h"

namespace lockstep::compare {

class Folder {
 public:
  // Makes the folder, or opens that of the same comparison. `runs` are in the order in which they are to be run.
  // Throws UsageError: it has other settings, is of another machine, is no comparison, or is in use; nothing in it has
  // changed then.
  Folder(const std::filesystem::path& path, const Settings& settings, const std::string& command,
         std::vector<Run> runs);

  const std::vector<Run>& runs() const { return runs_; }
  bool has_finished(const Run& run) const { return state_of(run) == "finished"; }
  int count(const std::string& state) const;

  std::filesystem::path of(const Run& run) const;
  std::filesystem::path begin(const Run& run);  // its folder, new and empty
  void end(const Run& run, const Outcome& outcome);
  const Json& entry(const Run& run) const { return entries_.at(run.name); }

 private:
  void lock();
  void read();
  void save() const;
  std::string state_of(const Run& run) const { return entry(run).at("state"); }

  std::filesystem::path path_;
  UniqueFd lock_;
  std::vector<Run> runs_;
  Json about_;                           // comparison.json without the runs
  std::map<std::string, Json> entries_;  // of comparison.json, by name
};

}  // namespace lockstep::compare
