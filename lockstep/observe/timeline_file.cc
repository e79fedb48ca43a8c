// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/timeline_file.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using TraceJson = nlohmann::ordered_json;
using trace::Kind;

TraceJson about(const Recordings& recordings, bool complete) {
  TraceJson text = {{"format", kTraceFormat}, {"complete", complete}, {"overwritten_spans", TraceJson::object()}};
  for (const trace::Recording& recording : recordings)
    text["overwritten_spans"][concat("rank ", recording.process.rank)] = recording.lost;
  return text;
}

TraceJson name_of(const trace::Process& process) {
  const std::string name = concat("rank ", process.rank, " on ", process.host.data(), ", pid ", process.pid);
  return {{"ph", "M"}, {"name", "process_name"}, {"pid", process.rank}, {"args", {{"name", name}}}};
}

double as_microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

// What an event of a rank begins with.
TraceJson json_of(const char* type, const std::string& name, int rank, int64_t time) {
  return {{"ph", type}, {"name", name}, {"pid", rank}, {"ts", as_microseconds(time)}};
}

TraceJson counter_json(const trace::Event& event, int rank) {
  TraceJson json = json_of("C", event.name.text(), rank, event.begin);
  json["args"] = {{"value", event.number}};
  return json;
}

TraceJson span_json(const trace::Event& event, int rank) {
  const std::string name = event.number < 0 ? event.name.text() : concat(event.name.text(), ' ', event.number);
  TraceJson json = json_of("X", name, rank, event.begin);
  json["tid"] = event.thread;
  json["dur"] = as_microseconds(event.end - event.begin);
  if (event.kind != Kind::kSpan) json["cat"] = event.kind == Kind::kForward ? "forward" : "backward";
  if (event.bytes >= 0) json["args"] = {{"bytes", event.bytes}};
  return json;
}

// One end of a message, within its span.
TraceJson flow_json(const trace::Event& event, int rank) {
  TraceJson json = json_of(event.arrives ? "f" : "s", "message", rank, event.arrives ? event.end : event.begin);
  json.update({{"tid", event.thread}, {"cat", "message"}, {"id", concat(event.flow)}});
  if (event.arrives) json["bp"] = "e";
  return json;
}

// ---- Rings

struct Ring {
  std::filesystem::path path;
  trace::Recording recording;
};

std::vector<std::filesystem::path> ring_files(const std::filesystem::path& file) {
  const std::string start = concat(file.filename().string(), ".rank");
  std::vector<std::filesystem::path> rings;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::absolute(file).parent_path(), ignored)) {
    const std::string name = entry.path().filename();
    int rank = 0;
    if (name.starts_with(start) && parse_int(name.substr(start.size()), rank)) rings.push_back(entry.path());
  }
  return rings;
}

// Reads the rings of the newest job beside `file`, by rank.
std::vector<Ring> read_rings(const std::string& file) {
  std::vector<Ring> rings;
  for (const auto& path : ring_files(file)) try {
      rings.push_back({path, trace::parse(read_file(path), path)});
    } catch (const DataError& error) {
      log_warning(error.what());
    }
  std::ranges::sort(rings, {}, [](const Ring& ring) { return ring.recording.process.rank; });
  int64_t newest = 0;
  for (const Ring& ring : rings) newest = std::max(newest, ring.recording.process.job);
  std::erase_if(rings, [&](const Ring& ring) {
    const bool earlier = ring.recording.process.job != newest;
    if (earlier) log_warning(concat(ring.path.string(), " is of an earlier job, and left out"));
    return earlier;
  });
  return rings;
}

// Returns whether all ranks are there and came to their end.
bool are_complete(const std::vector<Ring>& rings, const std::string& file) {
  const int64_t ranks = rings.front().recording.process.ranks;
  if (std::ssize(rings) < ranks)
    log_warning(
        concat(file, " has ", rings.size(), " of ", ranks, " ranks: what the others left is elsewhere, or gone"));
  return std::ssize(rings) == ranks &&
         std::ranges::all_of(rings, [](const Ring& ring) { return ring.recording.process.finished != 0; });
}

}  // namespace

void require_timeline_file(const std::string& file) {
  if (!file.empty() && !file.ends_with(".json"))
    throw UsageError({.what = concat("a trace can't be written to '", file, "'"),
                      .next = "give FILE.json, which Perfetto (ui.perfetto.dev) reads"});
}

void write_timeline(const std::string& file, const Recordings& recordings, bool complete) {
  int64_t start = std::numeric_limits<int64_t>::max();
  for (const trace::Recording& recording : recordings)
    for (const trace::Event& event : recording.events) start = std::min(start, event.begin);
  std::string text =
      concat(R"({"displayTimeUnit": "ms", "otherData": )", about(recordings, complete).dump(), R"(, "traceEvents": [)");
  const char* separator = "\n";
  const auto add = [&](const TraceJson& event) { text += std::exchange(separator, ",\n") + event.dump(); };
  for (const trace::Recording& recording : recordings) {
    add(name_of(recording.process));
    for (trace::Event event : recording.events) {
      event.begin -= start;
      event.end -= start;
      const int rank = recording.process.rank;
      add(event.kind == Kind::kCounter ? counter_json(event, rank) : span_json(event, rank));
      if (event.flow != 0) add(flow_json(event, rank));
    }
  }
  write_file(file, text + "\n]}\n");
}

std::string ring_file(const std::string& file, int rank) { return concat(file, ".rank", rank); }

bool merge_rings(const std::string& file, bool ended_well) {
  std::vector<Ring> rings = read_rings(file);
  if (rings.empty()) return false;
  const bool complete = are_complete(rings, file) && ended_well;
  Recordings recordings;
  for (Ring& ring : rings) recordings.push_back(std::move(ring.recording));
  write_timeline(file, recordings, complete);
  for (const Ring& ring : rings) std::filesystem::remove(ring.path);
  if (!complete) log_warning(concat(file, " has what each rank did before the run failed"));
  return true;
}

void save_what_is_left(const std::string& file, bool ended_well) try {
  merge_rings(file, ended_well);
} catch (const std::exception& error) {
  log_warning(error.what());
}

void remove_rings(const std::string& file) {
  for (const auto& ring : ring_files(file)) std::filesystem::remove(ring);
}

}  // namespace lockstep
