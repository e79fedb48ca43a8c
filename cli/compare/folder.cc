// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <set>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace lockstep::compare {
namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 1;

Json to_json(const Options& options) {
  Json json = Json::object();
  for (const auto& [option, value] : options) json[key_of(option)] = value;
  return json;
}

Json missing(const Run& run) {
  return {{"name", run.name},
          {"number", run.number},
          {"group", run.group},
          {"folder", concat("runs/", run.name)},
          {"contender", run.contender.name},
          {"strategy", run.contender.strategy},
          {"devices", run.devices},
          {"seed", run.seed},
          {"varied", to_json(run.varied)},
          {"arguments", run.arguments},
          {"state", "missing"},
          {"seconds", 0.0}};
}

// "batch_size is 256 there and 512 here"
std::string difference(const Json& there, const Json& here) {
  for (const auto& [key, value] : here.items())
    if (!there.contains(key) || there[key] != value)
      return concat(key, " is ", there.contains(key) ? there[key].dump() : "not given", " there and ", value.dump(),
                    " here");
  return "it has more settings";
}

UsageError not_the_same(const fs::path& path, const std::string& how) {
  return UsageError({.what = concat(path.string(), " holds another comparison: ", how),
                     .next = "give the settings of that comparison to continue it, or another --output"});
}

// Throws UsageError.
Json parsed(const fs::path& file) {
  const Json json = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  if (json.is_object() && json.value("lockstep_comparison", Json()) == kVersion && json.contains("settings") &&
      json.contains("machine") && json.contains("runs") && json["runs"].is_array())
    return json;
  throw UsageError({.what = concat(file.string(), " is no comparison that this lockstep can continue"),
                    .likely = "it is damaged, or of another version of lockstep",
                    .next = "give another --output"});
}

}  // namespace

Folder::Folder(const fs::path& path, const Settings& settings, const std::string& command, std::vector<Run> runs)
    : path_(path), runs_(std::move(runs)) {
  about_ = {{"lockstep_comparison", kVersion},
            {"experiment", settings.experiment},
            {"across", experiment_named(settings.experiment).across},
            {"settings", compare::to_json(settings)},
            {"machine", {{"description", bench::machine()}, {"cores", usable_cores().size()}}},
            {"command", command}};
  for (const Run& run : runs_) entries_[run.name] = missing(run);
  std::error_code error;
  fs::create_directories(path_, error);
  lock();
  if (fs::exists(path_ / "comparison.json"))
    read();
  else if (!fs::is_empty(path_))
    throw UsageError({.what = concat(path_.string(), " holds other files, and no comparison"),
                      .next = "give an --output that is empty, or not there"});
  save();
}

void Folder::lock() {
  lock_.reset(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_) throw system_error("make", path_);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return;
  throw UsageError({.what = concat("another process works on ", path_.string()),
                    .likely = "a `lockstep compare` that still runs",
                    .next = "wait for it, or give another --output"});
}

void Folder::read() {
  const Json before = parsed(path_ / "comparison.json");
  if (before["settings"] != about_["settings"])
    throw not_the_same(path_, difference(before["settings"], about_["settings"]));
  if (before["machine"] != about_["machine"])
    throw not_the_same(path_, difference(before["machine"], about_["machine"]));
  about_["command"] = before.value("command", Json(""));
  for (const Json& entry : before["runs"])
    if (const auto found = entries_.find(entry.value("name", "")); found != entries_.end())
      if (entry.value("state", "") == "finished" && entry.value("arguments", Json()) == found->second["arguments"])
        found->second = entry;
}

void Folder::save() const {
  Json all = about_;
  for (const Run& run : runs_) all["runs"].push_back(entry(run));
  write_file(path_ / "comparison.json", all.dump(2) + "\n");
}

int Folder::count(const std::string& state) const {
  return static_cast<int>(std::ranges::count_if(runs_, [&](const Run& run) { return state_of(run) == state; }));
}

fs::path Folder::of(const Run& run) const { return path_ / "runs" / run.name; }

fs::path Folder::begin(const Run& run) {
  std::error_code error;
  fs::remove_all(of(run), error);
  fs::create_directories(of(run), error);
  if (error) throw SystemError({.what = concat("making ", of(run).string(), " failed: ", error.message())});
  return of(run);
}

void Folder::end(const Run& run, const Outcome& outcome) {
  Json& entry = entries_.at(run.name);
  entry = missing(run);
  entry["state"] = outcome.why.empty() ? "finished" : "failed";
  entry["seconds"] = outcome.seconds;
  entry["exit_code"] = outcome.exit_code;
  if (!outcome.why.empty()) entry["why"] = outcome.why;
  entry["peak_memory_bytes"] = outcome.peak_memory_bytes;
  if (outcome.link_bytes)
    entry["busiest_link_bytes_per_step"] = {{"sent", outcome.link_bytes->sent},
                                            {"received", outcome.link_bytes->received}};
  save();
}

}  // namespace lockstep::compare
