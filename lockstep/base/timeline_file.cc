// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/timeline_file.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>

#include <nlohmann/json.hpp>
#include <protozero/pbf_writer.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using TraceJson = nlohmann::ordered_json;
using protozero::pbf_writer;
using trace::Kind;
using trace::RecordedSpan;

std::int64_t earliest(const Recordings& recordings) {
  std::int64_t start = std::numeric_limits<std::int64_t>::max();
  for (const trace::Recording& recording : recordings)
    for (const RecordedSpan& span : recording.spans) start = std::min(start, span.begin);
  return start;
}

std::string name_of(const RecordedSpan& span) {
  return span.number < 0 ? span.name : concat(span.name, ' ', span.number);
}

std::string name_of(const trace::Process& process) {
  return concat("rank ", process.rank, " on ", process.host.data(), ", pid ", process.pid);
}

TraceJson about(const Recordings& recordings, bool complete) {
  TraceJson text = {{"format", kTraceFormat}, {"complete", complete}, {"overwritten_spans", TraceJson::object()}};
  for (const trace::Recording& recording : recordings)
    text["overwritten_spans"][concat("rank ", recording.process.rank)] = recording.lost;
  return text;
}

// ---- JSON

double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000; }

TraceJson json_of(const trace::Process& process) {
  return {{"ph", "M"}, {"name", "process_name"}, {"pid", process.rank}, {"args", {{"name", name_of(process)}}}};
}

const char* category_of(Kind kind) {
  if (kind == Kind::kForward) return "forward";
  return kind == Kind::kBackward ? "backward" : nullptr;
}

TraceJson json_of(const RecordedSpan& span, int rank, std::int64_t start) {
  if (span.kind == Kind::kCounter)
    return {{"ph", "C"},
            {"name", span.name},
            {"pid", rank},
            {"ts", microseconds(span.begin - start)},
            {"args", {{"value", span.number}}}};
  TraceJson event = {{"ph", "X"},
                     {"name", name_of(span)},
                     {"pid", rank},
                     {"tid", span.thread},
                     {"ts", microseconds(span.begin - start)},
                     {"dur", microseconds(span.end - span.begin)}};
  if (const char* category = category_of(span.kind)) event["cat"] = category;
  if (span.bytes >= 0) event["args"] = {{"bytes", span.bytes}};
  return event;
}

// One end of a message's arrow, within its span.
TraceJson arrow_of(const RecordedSpan& span, int rank, std::int64_t start) {
  TraceJson event = {{"ph", span.arrives ? "f" : "s"},
                     {"cat", "message"},
                     {"name", "message"},
                     {"id", concat(span.arrow)},
                     {"pid", rank},
                     {"tid", span.thread},
                     {"ts", microseconds((span.arrives ? span.end : span.begin) - start)}};
  if (span.arrives) event["bp"] = "e";
  return event;
}

std::string json_trace(const Recordings& recordings, bool complete) {
  const std::int64_t start = earliest(recordings);
  std::string events;
  const auto add = [&](const TraceJson& event) { events += (events.empty() ? "\n" : ",\n") + event.dump(); };
  for (const trace::Recording& recording : recordings) {
    add(json_of(recording.process));
    for (const RecordedSpan& span : recording.spans) {
      add(json_of(span, recording.process.rank, start));
      if (span.arrow != 0) add(arrow_of(span, recording.process.rank, start));
    }
  }
  return concat(R"({"displayTimeUnit": "ms", "otherData": )", about(recordings, complete).dump(),
                R"(, "traceEvents": [)", events, "\n]}\n");
}

// ---- Protobuf: a track per rank, under it one per thread; a packet for each begin and end

class PacketWriter {
 public:
  explicit PacketWriter(std::int64_t start) : start_(start) {}

  std::uint64_t add_track(std::uint64_t parent, const std::string& name, bool counts = false) {
    pbf_writer packet(trace_, 1);
    pbf_writer track(packet, 60);
    track.add_uint64(1, ++tracks_);
    track.add_string(2, name);
    if (parent != 0) track.add_uint64(5, parent);
    if (counts) track.add_message(8, std::string());  // a CounterDescriptor
    return tracks_;
  }

  void add_counts(std::uint64_t track, const std::vector<RecordedSpan>& counts) {
    for (const RecordedSpan& count : counts) {
      pbf_writer packet = begin_packet(count.begin);
      pbf_writer event(packet, 11);
      event.add_enum(9, 4);  // TYPE_COUNTER
      event.add_uint64(11, track);
      event.add_int64(30, count.number);
    }
  }

  // All spans of a thread. Those within another are those that begin and end within it.
  void add_spans(std::uint64_t track, std::vector<RecordedSpan> spans) {
    std::ranges::sort(spans, [](const RecordedSpan& a, const RecordedSpan& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    std::vector<std::int64_t> open;  // the ends of those that the next one may be in
    const auto end_until = [&](std::int64_t time) {
      for (; !open.empty() && open.back() <= time; open.pop_back()) add_event(track, open.back(), nullptr);
    };
    for (const RecordedSpan& span : spans) {
      end_until(span.begin);
      add_event(track, span.begin, &span);
      open.push_back(span.end);
    }
    end_until(std::numeric_limits<std::int64_t>::max());
  }

  std::string take() { return std::move(bytes_); }

 private:
  pbf_writer begin_packet(std::int64_t time) {
    pbf_writer packet(trace_, 1);
    packet.add_uint64(8, static_cast<std::uint64_t>(time - start_));
    packet.add_uint32(10, 1);  // all packets are one sequence
    return packet;
  }

  void add_event(std::uint64_t track, std::int64_t time, const RecordedSpan* begins) {
    pbf_writer packet = begin_packet(time);
    pbf_writer event(packet, 11);
    event.add_enum(9, begins != nullptr ? 1 : 2);  // TYPE_SLICE_BEGIN, TYPE_SLICE_END
    event.add_uint64(11, track);
    if (begins == nullptr) return;
    if (const char* category = category_of(begins->kind)) event.add_string(22, category);
    event.add_string(23, name_of(*begins));
    if (begins->arrow != 0) event.add_fixed64(begins->arrives ? 48 : 47, begins->arrow);  // terminating flow, flow
    if (begins->bytes < 0) return;
    pbf_writer annotation(event, 4);
    annotation.add_string(10, "bytes");
    annotation.add_int64(4, begins->bytes);
  }

  std::int64_t start_;
  std::uint64_t tracks_ = 0;
  std::string bytes_;
  pbf_writer trace_{bytes_};
};

void add_recording(PacketWriter& writer, const trace::Recording& recording) {
  const std::uint64_t rank = writer.add_track(0, name_of(recording.process));
  std::map<std::int32_t, std::vector<RecordedSpan>> threads;
  std::map<std::string, std::vector<RecordedSpan>> counters;
  for (const RecordedSpan& span : recording.spans)
    (span.kind == Kind::kCounter ? counters[span.name] : threads[span.thread]).push_back(span);
  for (const auto& [name, counts] : counters) writer.add_counts(writer.add_track(rank, name, /*counts=*/true), counts);
  for (auto& [thread, spans] : threads)
    writer.add_spans(writer.add_track(rank, concat("thread ", thread)), std::move(spans));
}

std::string protobuf_trace(const Recordings& recordings, bool complete) {
  PacketWriter writer(earliest(recordings));
  writer.add_track(0, about(recordings, complete).dump());
  for (const trace::Recording& recording : recordings) add_recording(writer, recording);
  return writer.take();
}

// ---- Rings

struct Ring {
  std::filesystem::path path;
  trace::Recording recording;
};

std::vector<std::filesystem::path> ring_files(const std::filesystem::path& file) {
  std::vector<std::filesystem::path> rings;
  const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (file_of_ring(entry.path().filename()) == file.filename()) rings.push_back(entry.path());
  return rings;
}

std::vector<Ring> read_rings(const std::string& file) {
  std::vector<Ring> rings;
  for (const auto& path : ring_files(file)) try {
      rings.push_back({path, trace::parse(read_file(path), path)});
    } catch (const DataError& error) {
      log_warning(error.what());
    }
  std::ranges::sort(rings, {}, [](const Ring& ring) { return ring.recording.process.rank; });
  return rings;
}

// The rings of the newest job, which is not empty if `rings` are not.
std::vector<Ring> of_newest_job(std::vector<Ring> rings) {
  std::int64_t newest = 0;
  for (const Ring& ring : rings) newest = std::max(newest, ring.recording.process.job);
  std::erase_if(rings, [&](const Ring& ring) {
    const bool earlier = ring.recording.process.job != newest;
    if (earlier) log_warning(concat(ring.path.string(), " is of an earlier job, and left out"));
    return earlier;
  });
  return rings;
}

// Whether all ranks are there and came to their end.
bool are_complete(const std::vector<Ring>& rings, const std::string& file) {
  const std::int64_t ranks = rings.front().recording.process.ranks;
  if (std::ssize(rings) < ranks)
    log_warning(
        concat(file, " has ", rings.size(), " of ", ranks, " ranks: what the others left is elsewhere, or gone"));
  return std::ssize(rings) == ranks &&
         std::ranges::all_of(rings, [](const Ring& ring) { return ring.recording.process.finished != 0; });
}

}  // namespace

bool is_timeline_file(const std::string& file) { return file.ends_with(".json") || file.ends_with(".pftrace"); }

void require_timeline_file(const std::string& file) {
  if (!is_timeline_file(file))
    throw UsageError({.what = concat("a trace can't be written to '", file, "'"),
                      .next = "end the file's name in .json or .pftrace"});
}

void write_timeline(const std::string& file, const Recordings& recordings, bool complete) {
  write_file(file, file.ends_with(".json") ? json_trace(recordings, complete) : protobuf_trace(recordings, complete));
}

std::string ring_file(const std::string& file, int rank) { return concat(file, ".rank", rank); }

std::string file_of_ring(const std::string& ring) {
  constexpr std::string_view kRank = ".rank";
  const std::size_t end = std::min(ring.rfind(kRank), ring.size());
  int rank = 0;
  const bool is_ring = end < ring.size() && parse_int(ring.substr(end + kRank.size()), rank);
  return is_ring && is_timeline_file(ring.substr(0, end)) ? ring.substr(0, end) : "";
}

bool merge_rings(const std::string& file, bool ended_well) {
  std::vector<Ring> rings = of_newest_job(read_rings(file));
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
