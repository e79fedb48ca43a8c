// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/timeline_file.h"

#include <algorithm>
#include <limits>
#include <map>

#include <nlohmann/json.hpp>
#include <protozero/pbf_writer.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using TraceJson = nlohmann::ordered_json;
using protozero::pbf_writer;
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
  TraceJson text = {{"complete", complete}, {"overwritten_spans", TraceJson::object()}};
  for (const trace::Recording& recording : recordings)
    text["overwritten_spans"][concat("rank ", recording.process.rank)] = recording.lost;
  return text;
}

// ---- JSON

double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000; }

TraceJson json_of(const trace::Process& process) {
  return {{"ph", "M"}, {"name", "process_name"}, {"pid", process.rank}, {"args", {{"name", name_of(process)}}}};
}

TraceJson json_of(const RecordedSpan& span, int rank, std::int64_t start) {
  TraceJson event = {{"ph", "X"},
                     {"name", name_of(span)},
                     {"pid", rank},
                     {"tid", span.thread},
                     {"ts", microseconds(span.begin - start)},
                     {"dur", microseconds(span.end - span.begin)}};
  if (span.bytes >= 0) event["args"] = {{"bytes", span.bytes}};
  return event;
}

std::string json_trace(const Recordings& recordings, bool complete) {
  const std::int64_t start = earliest(recordings);
  std::string events;
  const auto add = [&](const TraceJson& event) { events += (events.empty() ? "\n" : ",\n") + event.dump(); };
  for (const trace::Recording& recording : recordings) {
    add(json_of(recording.process));
    for (const RecordedSpan& span : recording.spans) add(json_of(span, recording.process.rank, start));
  }
  return concat(R"({"displayTimeUnit": "ms", "otherData": )", about(recordings, complete).dump(),
                R"(, "traceEvents": [)", events, "\n]}\n");
}

// ---- Protobuf: a track per rank, under it one per thread; a packet for each begin and end

class PacketWriter {
 public:
  explicit PacketWriter(std::int64_t start) : start_(start) {}

  void add_track(std::uint64_t uuid, std::uint64_t parent, const std::string& name) {
    pbf_writer packet(trace_, 1);
    pbf_writer track(packet, 60);
    track.add_uint64(1, uuid);
    track.add_string(2, name);
    if (parent != 0) track.add_uint64(5, parent);
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
  void add_event(std::uint64_t track, std::int64_t time, const RecordedSpan* begins) {
    pbf_writer packet(trace_, 1);
    packet.add_uint64(8, static_cast<std::uint64_t>(time - start_));
    packet.add_uint32(10, 1);  // all packets are one sequence
    pbf_writer event(packet, 11);
    event.add_enum(9, begins != nullptr ? 1 : 2);  // TYPE_SLICE_BEGIN, TYPE_SLICE_END
    event.add_uint64(11, track);
    if (begins == nullptr) return;
    event.add_string(23, name_of(*begins));
    if (begins->bytes < 0) return;
    pbf_writer annotation(event, 4);
    annotation.add_string(10, "bytes");
    annotation.add_int64(4, begins->bytes);
  }

  std::int64_t start_;
  std::string bytes_;
  pbf_writer trace_{bytes_};
};

std::string protobuf_trace(const Recordings& recordings, bool complete) {
  PacketWriter writer(earliest(recordings));
  std::uint64_t uuid = 0;
  writer.add_track(++uuid, 0, about(recordings, complete).dump());
  for (const trace::Recording& recording : recordings) {
    const std::uint64_t rank = ++uuid;
    writer.add_track(rank, 0, name_of(recording.process));
    std::map<std::int32_t, std::vector<RecordedSpan>> threads;
    for (const RecordedSpan& span : recording.spans) threads[span.thread].push_back(span);
    for (auto& [thread, spans] : threads) {
      writer.add_track(++uuid, rank, concat("thread ", thread));
      writer.add_spans(uuid, std::move(spans));
    }
  }
  return writer.take();
}

}  // namespace

bool is_timeline_file(const std::string& file) { return file.ends_with(".json") || file.ends_with(".pftrace"); }

void write_timeline(const std::string& file, const Recordings& recordings, bool complete) {
  write_file(file, file.ends_with(".json") ? json_trace(recordings, complete) : protobuf_trace(recordings, complete));
}

}  // namespace lockstep
