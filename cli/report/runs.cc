// SPDX-License-Identifier: Apache-2.0
#include "cli/report/runs.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "cli/report/metrics.h"
#include "cli/report/trace.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;

constexpr int kComparisonFormat = 1;

struct RunFiles {
  std::string name;
  fs::path metrics{};  // may be empty
  fs::path trace{};    // may be empty
};

// ---- One run

void add_partial(Json& run, const Json& missing) {
  for (const Json& text : missing) run["partial"].push_back(text);
}

Json read(const RunFiles& files) {
  Json run = {{"name", files.name}, {"partial", Json::array()}};
  if (!files.metrics.empty()) {
    const Json metrics = read_metrics(files.metrics);
    for (const auto& [key, value] : metrics.items())
      if (key != "partial") run[key] = value;
    add_partial(run, metrics.at("partial"));
  }
  if (!files.trace.empty()) {
    run["trace"] = read_trace(files.trace);
    add_partial(run, run["trace"]["partial"]);
  }
  return run;
}

// The end of a run that was asked to stop is an end, but not the one that was meant, unless a comparison gave it a budget.
void note_stop(Json& run) {
  if (run.contains("run") && text_of(run["run"], "event") == "stop") run["partial"].push_back("stopped by a signal");
}

RunFiles files_of_folder(const fs::path& folder, const std::string& name) {
  RunFiles files{.name = name, .metrics = folder / "metrics.jsonl"};
  if (fs::exists(folder / "trace.json")) files.trace = folder / "trace.json";
  if (fs::exists(files.metrics)) return files;
  throw UsageError({.what = concat(folder.string(), " has neither metrics.jsonl nor comparison.json"),
                    .next = "name the metrics file, or a folder that `lockstep compare` has written"});
}

std::string default_name(fs::path path) {
  if (!path.has_filename()) path = path.parent_path();  // "folder/"
  if (path.filename() == "metrics.jsonl" && path.has_parent_path()) path = path.parent_path();
  return path.extension() == ".jsonl" ? path.stem().string() : path.filename().string();
}

// [NAME=]METRICS[,TRACE]. A file or folder that is called like that is one.
RunFiles files_of(const std::string& word) {
  RunFiles files{.metrics = word};
  const auto equals = word.find('=');
  if (!fs::exists(word) && equals != std::string::npos) {
    files.name = word.substr(0, equals);
    files.metrics = word.substr(equals + 1);
  }
  const std::string path = files.metrics.string();
  const auto comma = path.rfind(',');
  if (!fs::exists(path) && comma != std::string::npos) {
    files.metrics = path.substr(0, comma);
    files.trace = path.substr(comma + 1);
  }
  if (files.name.empty()) files.name = default_name(files.metrics);
  if (fs::is_directory(files.metrics)) return files_of_folder(files.metrics, files.name);
  if (files.trace.empty() && fs::exists(files.metrics) && is_trace(files.metrics))
    std::swap(files.metrics, files.trace);
  return files;
}

// ---- A comparison

Json read_comparison(const fs::path& file) {
  Json comparison = parse(read_file(file));
  if (comparison.is_discarded() || !has_number(comparison, "lockstep_comparison") ||
      find(comparison, "runs") == nullptr || !comparison["runs"].is_array())
    throw DataError({.what = concat(file.string(), " does not describe a comparison"),
                     .likely = "it is cut off, or another kind of file",
                     .next = "run `lockstep compare` again with the same folder: it goes on where it was"});
  require_known_format(comparison, "lockstep_comparison", kComparisonFormat, file.string());
  return comparison;
}

// One of the runs; what there is of it.
Json read_case(const fs::path& folder, const Json& about) {
  const std::string state = text_of(about, "state");
  Json run = {{"name", text_of(about, "name")}, {"partial", Json::array()}};
  try {
    run = read(files_of_folder(folder / text_of(about, "folder"), text_of(about, "name")));
  } catch (const Error& error) {
    run["partial"].push_back(state == "finished" ? error.text().what : "there is nothing of it");
  }
  const std::string why = text_of(about, "why");
  if (state != "finished")
    run["partial"].push_back(concat("state: ", state.empty() ? "unknown" : state, why.empty() ? "" : ": ", why));
  run["case"] = about;
  return run;
}

// ---- All

// A file of `lockstep bench step --json`, or nothing.
Json read_benchmark(const std::string& word) {
  if (!fs::is_regular_file(word) || !word.ends_with(".json") || is_trace(word)) return nullptr;
  Json benchmark = parse(read_file(word));
  const Json* models = find(benchmark, "models");
  if (models == nullptr || !models->is_object() || models->empty()) return nullptr;
  const auto measured = [](const Json& model) {
    const Json* ours = find(model, "lockstep");
    return ours != nullptr && has_number(*ours, "step");
  };
  return std::ranges::all_of(*models, measured) ? benchmark : Json();
}

void add_runs(const std::string& word, Json& found) {
  if (const Json benchmark = read_benchmark(word); !benchmark.is_null()) {
    found["benchmarks"].push_back(benchmark);
    return;
  }
  const bool is_description = fs::path(word).filename() == "comparison.json";
  const fs::path folder = is_description ? fs::absolute(word).parent_path() : fs::path(word);
  const fs::path description = folder / "comparison.json";
  if (!fs::exists(description)) {
    found["runs"].push_back(read(files_of(word)));
    note_stop(found["runs"].back());
    return;
  }
  if (!found["comparison"].is_null())
    throw UsageError({.what = concat(word, " is a second comparison"), .next = "make a page of each"});
  Json comparison = read_comparison(description);
  const auto number = [](const Json& about) { return has_number(about, "number") ? about["number"].get<int>() : 0; };
  std::ranges::stable_sort(comparison["runs"].get_ref<Json::array_t&>(), {}, number);  // as in the tables, not as made
  for (const Json& about : comparison["runs"]) found["runs"].push_back(read_case(folder, about));
  comparison.erase("runs");
  found["comparison"] = comparison;
}

// What a run was of: by its last event, or by its settings if it did not come so far.
std::string subject(const Json& run, const char* key) {
  for (const char* event : {"run", "start"}) {
    const Json* facts = find(run, event);
    if (facts != nullptr && std::string(event) == "start") facts = find(*facts, "settings");
    const std::string value = facts != nullptr ? text_of(*facts, key) : "";
    if (!value.empty() && value != "auto") return value;
  }
  return "";
}

// Whether it is a run of a comparison that tries several values of `key`.
bool varies(const Json& run, const char* key) {
  const Json* about = find(run, "case");
  const Json* varied = about == nullptr ? nullptr : find(*about, "varied");
  return varied != nullptr && find(*varied, key) != nullptr;
}

void warn_of_differences(Json& found) {
  for (const char* key : {"model", "data"}) {
    if (std::ranges::all_of(found["runs"], [key](const Json& run) { return varies(run, key); })) continue;
    std::set<std::string> values;
    for (const Json& run : found["runs"])
      if (const std::string value = subject(run, key); !value.empty()) values.insert(value);
    if (values.size() > 1)
      found["warnings"].push_back(concat("The runs differ in ", key, " (", join(values, ", "),
                                         "): their losses and times say nothing about each other."));
  }
}

void number_equal_names(Json& runs) {
  std::set<std::string> names;
  for (Json& run : runs) {
    const auto name = run["name"].get<std::string>();
    for (int i = 2; !names.insert(run["name"]).second; ++i) run["name"] = concat(name, " (", i, ")");
  }
}

}  // namespace

Json read_runs(const std::vector<std::string>& runs) {
  Json found = {
      {"runs", Json::array()}, {"comparison", nullptr}, {"benchmarks", Json::array()}, {"warnings", Json::array()}};
  for (const std::string& word : runs) add_runs(word, found);
  number_equal_names(found["runs"]);
  warn_of_differences(found);
  return found;
}

}  // namespace lockstep::report
