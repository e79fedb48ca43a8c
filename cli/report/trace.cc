// SPDX-License-Identifier: Apache-2.0
#include "cli/report/trace.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <span>
#include <utility>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"

namespace lockstep::report {
namespace {

constexpr std::size_t kPointsOfRank = 300;

struct Span {
  std::string name;  // without the number at its end
  std::string number;
  std::int64_t thread = 0;
  double begin = 0;  // microseconds
  double end = 0;
  double bytes = -1;
};

struct Count {
  double time = 0;  // microseconds
  double value = 0;
};

struct Rank {
  std::string name;
  std::vector<Span> spans;
  std::map<std::string, std::vector<Count>> counters;
};

struct Trace {
  Json about = Json::object();
  std::map<std::int64_t, Rank> ranks;
  std::size_t spans = 0;
  bool cut_off = false;
};

// ---- Reading

Span span_of(const Json& event) {
  Span span{.name = text_of(event, "name"),
            .thread = event.at("tid").get<std::int64_t>(),
            .begin = event.at("ts").get<double>(),
            .end = event.at("ts").get<double>() + event.at("dur").get<double>()};
  const auto digits = span.name.find_last_not_of("0123456789") + 1;
  if (digits > 1 && digits < span.name.size() && span.name[digits - 1] == ' ') {
    span.number = span.name.substr(digits);
    span.name.resize(digits - 1);
  }
  if (const Json* args = find(event, "args"); args != nullptr && has_number(*args, "bytes"))
    span.bytes = args->at("bytes").get<double>();
  return span;
}

void add_event(const Json& event, Trace& trace) {
  if (!has_number(event, "pid")) return;
  Rank& rank = trace.ranks[event.at("pid").get<std::int64_t>()];
  const std::string kind = text_of(event, "ph");
  if (kind == "M" && text_of(event, "name") == "process_name" && event.contains("args"))
    rank.name = text_of(event.at("args"), "name");
  const Json* args = find(event, "args");
  if (kind == "C" && args != nullptr && has_number(*args, "value") && has_number(event, "ts"))
    rank.counters[text_of(event, "name")].push_back({event.at("ts").get<double>(), args->at("value").get<double>()});
  if (kind != "X" || !has_number(event, "tid") || !has_number(event, "ts") || !has_number(event, "dur")) return;
  rank.spans.push_back(span_of(event));
  ++trace.spans;
}

// Reads a file that may be cut off: `otherData` and the first events are in its first line, then there is an event a line.
Trace trace_in(const std::string& content) {
  Trace trace{.cut_off = !content.ends_with("]}\n")};
  std::vector<std::string> lines = split(content, '\n');
  for (std::string& line : lines)
    if (line.ends_with(',')) line.pop_back();
  const Json head = parse(lines.front() + "]}");
  if (const Json* about = find(head, "otherData")) trace.about = *about;
  if (const Json* events = find(head, "traceEvents"))
    for (const Json& event : *events) add_event(event, trace);
  for (const std::string& line : lines) add_event(parse(line), trace);
  return trace;
}

std::vector<std::string> missing_in(const Trace& trace) {
  std::vector<std::string> missing;
  if (trace.cut_off) missing.emplace_back("the trace is cut off");
  if (const Json* complete = find(trace.about, "complete"); complete != nullptr && *complete == false)
    missing.emplace_back("the trace is of a run that failed");
  const Json* found = find(trace.about, "overwritten_spans");
  const Json overwritten = found != nullptr ? *found : Json::object();
  for (const auto& [rank, spans] : overwritten.items())
    if (spans.is_number() && spans.get<double>() > 0)
      missing.push_back(concat("the oldest ", spans.dump(), " spans of ", rank, " are overwritten"));
  return missing;
}

// ---- Where the time goes

// Empty: the same as the span around it.
std::string kind_of(const std::string& name) {
  static constexpr std::pair<const char*, const char*> kKinds[] = {
      {"forward", "forward"}, {"backward", "backward"},     {"exchange", "exchange"},      {"update", "update"},
      {"barrier", "waiting"}, {"wait for rank", "waiting"}, {"receive", "waiting"},        {"wait for batch", "data"},
      {"load batch", "data"}, {"checkpoint", "checkpoint"}, {"end of epoch", "validation"}};
  for (const auto& [start, kind] : kKinds)
    if (name.starts_with(start)) return kind;
  return "";
}

// The spans of one thread, outer ones first.
std::vector<const Span*> of_thread(const Rank& rank, std::int64_t thread) {
  std::vector<const Span*> spans;
  for (const Span& span : rank.spans)
    if (span.thread == thread) spans.push_back(&span);
  std::ranges::sort(
      spans, [](const Span* a, const Span* b) { return a->begin != b->begin ? a->begin < b->begin : a->end > b->end; });
  return spans;
}

struct Open {
  const Span* span;
  std::string kind;
};

// A span's time is its kind's, less that of the spans within it.
std::map<std::string, double> time_by_kind(const std::vector<const Span*>& spans) {
  std::map<std::string, double> times;
  std::vector<Open> open;
  for (const Span* span : spans) {
    while (!open.empty() && open.back().span->end <= span->begin) open.pop_back();
    std::string kind = kind_of(span->name);
    if (kind.empty()) kind = open.empty() ? "other" : open.back().kind;
    const double took = span->end - span->begin;
    if (!open.empty()) times[open.back().kind] -= took;
    times[kind] += took;
    open.push_back({span, kind});
  }
  return times;
}

Json time_of_waits(const std::vector<const Span*>& spans, double steps) {
  std::map<std::string, double> waits;
  for (const Span* span : spans)
    if (span->name == "wait for rank") waits[span->number] += (span->end - span->begin) / 1e3 / steps;
  return waits;
}

// Leaves "send bucket" out: what a rank hands over and what machines then exchange are the same bytes.
Json bytes_of(const Rank& rank, double steps) {
  std::map<std::string, double> bytes;
  for (const Span& span : rank.spans)
    if (span.bytes >= 0 && span.name != "send bucket") bytes[span.name] += span.bytes / steps;
  return bytes;
}

double waited_in(const Span& step, const std::vector<const Span*>& spans) {
  double waited = 0, until = step.begin;
  const auto begin = std::ranges::lower_bound(spans, step.begin, {}, [](const Span* span) { return span->begin; });
  for (auto at = begin; at != spans.end() && (*at)->begin < step.end; ++at) {
    if ((*at)->begin < until || kind_of((*at)->name) != "waiting") continue;
    waited += (*at)->end - (*at)->begin;
    until = (*at)->end;  // what lies within is counted
  }
  return waited;
}

// Calls add_point() for each few of `all`: for one of them, where there are at most kPointsOfRank.
template <class All>
void for_each_few(const All& all, const auto& add_point) {
  const std::size_t few = (all.size() + kPointsOfRank - 1) / kPointsOfRank;
  for (std::span rest(all); !rest.empty(); rest = rest.subspan(std::min(few, rest.size())))
    add_point(rest.first(std::min(few, rest.size())));
}

Json busy_of(const std::vector<const Span*>& steps, const std::vector<const Span*>& spans) {
  Json busy = {{"step", Json::array()}, {"ms", Json::array()}};
  for_each_few(steps, [&](const auto& few) {
    double time = 0;
    for (const Span* step : few) time += step->end - step->begin - waited_in(*step, spans);
    busy["step"].push_back(std::strtoll(few.back()->number.c_str(), nullptr, 10));
    busy["ms"].push_back(time / 1e3 / static_cast<double>(few.size()));
  });
  return busy;
}

// Takes the greatest of each few where there are many.
Json points_of(std::vector<Count> counts) {
  std::ranges::sort(counts, {}, &Count::time);
  Json points = {{"seconds", Json::array()}, {"value", Json::array()}};
  for_each_few(counts, [&](const auto& few) {
    const Count most = std::ranges::max(few, {}, &Count::value);
    points["seconds"].push_back(most.time / 1e6);
    points["value"].push_back(most.value);
  });
  return points;
}

bool is_step(const Span& span) { return span.name == "step" && !span.number.empty(); }

Json facts_of(std::int64_t number, const Rank& rank) {
  Json facts = {{"rank", number}, {"name", rank.name}, {"steps", 0}, {"counters", Json::object()}};
  for (const auto& [name, counts] : rank.counters) facts["counters"][name] = points_of(counts);
  const auto first = std::ranges::find_if(rank.spans, is_step);
  if (first == rank.spans.end()) return facts;  // a server
  const auto spans = of_thread(rank, first->thread);
  std::vector<const Span*> steps;
  std::ranges::copy_if(spans, std::back_inserter(steps), [](const Span* span) { return is_step(*span); });
  const auto count = static_cast<double>(steps.size());
  facts["steps"] = steps.size();
  for (const auto& [kind, time] : time_by_kind(spans)) facts["ms"][kind] = time / 1e3 / count;
  facts["waits_for"] = time_of_waits(spans, count);
  facts["bytes"] = bytes_of(rank, count);
  facts["busy"] = busy_of(steps, spans);
  return facts;
}

void require_json(const std::filesystem::path& file) {
  if (const std::string trace = file_of_ring(file); !trace.empty())
    throw DataError({.what = concat(file.string(), " is what one rank kept for its trace"),
                     .likely = "the run was ended before its trace was written",
                     .next = concat("lockstep trace ", trace, ", and report that file")});
}

}  // namespace

bool is_trace(const std::filesystem::path& file) {
  if (!file_of_ring(file).empty()) return true;
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line.find("\"traceEvents\"") != std::string::npos;
}

Json read_trace(const std::filesystem::path& file) {
  require_json(file);
  const std::string content = read_file(file);
  const Trace trace = trace_in(content);
  require_known_format(trace.about, "format", kTraceFormat, file.string());
  if (trace.spans == 0)
    throw DataError({.what = concat(file.string(), content.empty() ? " is empty" : " has no span in it"),
                     .likely = "the run died before its first step, or another kind of file",
                     .next = "give what `lockstep train --trace FILE.json` has written"});
  Json ranks = Json::array();
  for (const auto& [number, rank] : trace.ranks) ranks.push_back(facts_of(number, rank));
  return {{"ranks", ranks}, {"partial", missing_in(trace)}};
}

}  // namespace lockstep::report
