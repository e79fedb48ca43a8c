// SPDX-License-Identifier: Apache-2.0
#include "cli/top/layout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep::top {
namespace {

std::string percent_of(double share) { return concat(std::lround(100 * share), '%'); }

std::string share_text(const RankView& rank, double Shares::*share) {
  return rank.is_known() && !rank.server ? percent_of(rank.shares.*share) : "-";
}

std::string cut(std::string text, int width) {
  if (std::ssize(text) > width) text.resize(to_size(std::max(0, width)));
  return text;
}

std::string phase_text(const RankView& rank) {
  if (!rank.is_known()) return "no lockstep";
  if (rank.now.state == 'T' || rank.now.state == 't') return "stopped";
  if (rank.now.state == 0 && rank.now.phase != Phase::kEnded) return "died";
  return rank.server ? "serving" : lockstep::name_of(rank.now.phase);
}

// At most six characters.
std::string age_text(double seconds) {
  constexpr double kHour = 3600;
  if (seconds < 1) return concat(std::lround(999 * seconds), " ms");
  return seconds < kHour ? human_seconds(seconds) : concat(std::lround(seconds / kHour), " h");
}

std::string awaited_rank(const RankView& rank) {
  if (rank.now.wait_since == 0) return rank.now.calls_others ? "net" : "-";
  return rank.waits_for ? concat(*rank.waits_for) : "any";
}

struct Column {
  const char* name;
  int width;
  int keep;  // the column with the least is the first that is left out
  bool left;
  std::string (*text)(const RankView& rank);
};

const std::array kColumns = {
    Column{"rank", 4, 99, false, [](const RankView& rank) { return concat(rank.now.rank); }},
    Column{"step", 8, 12, false, [](const RankView& rank) { return rank.now.step < 0 ? "-" : concat(rank.now.step); }},
    Column{"samples/s", 9, 7, false,
           [](const RankView& rank) {
             return rank.samples_per_second > 0 ? with_thousands(std::llround(rank.samples_per_second)) : "-";
           }},
    Column{"comp", 4, 11, false, [](const RankView& rank) { return share_text(rank, &Shares::compute); }},
    Column{"wait", 4, 13, false, [](const RankView& rank) { return share_text(rank, &Shares::wait); }},
    Column{"exch", 4, 4, false, [](const RankView& rank) { return share_text(rank, &Shares::exchange); }},
    Column{"data", 4, 10, false, [](const RankView& rank) { return share_text(rank, &Shares::data); }},
    Column{"upd", 4, 9, false, [](const RankView& rank) { return share_text(rank, &Shares::update); }},
    Column{"memory", 10, 5, false,
           [](const RankView& rank) {
             return rank.now.resident_bytes > 0 ? human_bytes(static_cast<std::uint64_t>(rank.now.resident_bytes))
                                                : "-";
           }},
    Column{"age", 6, 8, false,
           [](const RankView& rank) { return rank.is_known() ? age_text(rank.seconds_since_progress) : "-"; }},
    Column{"phase", 11, 6, true, phase_text},
    Column{"for", 4, 3, false, awaited_rank},
    Column{"pid", 8, 2, false, [](const RankView& rank) { return rank.is_known() ? concat(rank.now.pid) : "-"; }},
    Column{"loss", 10, 1, false,
           [](const RankView& rank) { return rank.now.samples > 0 ? fixed(rank.now.loss, 4) : "-"; }},
};

std::vector<const Column*> columns_within(int width) {
  std::vector<const Column*> columns;
  int total = -1;
  for (const Column& column : kColumns) {
    columns.push_back(&column);
    total += column.width + 1;
  }
  while (total > width && columns.size() > 1) {
    const auto least = std::ranges::min_element(columns, {}, [](const Column* column) { return column->keep; });
    total -= (*least)->width + 1;
    columns.erase(least);
  }
  return columns;
}

template <class Text>
std::string row(const std::vector<const Column*>& columns, const Text& text_of) {
  std::string row;
  for (const Column* column : columns) {
    const std::string text = cut(text_of(*column), column->width);
    const std::string blanks(to_size(column->width) - text.size(), ' ');
    row += concat(row.empty() ? "" : " ", column->left ? text + blanks : blanks + text);
  }
  while (row.ends_with(' ')) row.pop_back();
  return row;
}

// As many of the parts as fit, beginning with the first.
std::string as_many_as_fit(const std::vector<std::string>& parts, int width) {
  std::string line = parts.front();
  for (std::size_t i = 1; i < parts.size() && std::ssize(line) + std::ssize(parts[i]) + 2 <= width; ++i)
    line += ", " + parts[i];
  return cut(line, width);
}

std::vector<std::string> facts_of(const JobView& job) {
  const bool one = job.ranks.size() == 1;
  const std::string of = job.job.world_size == std::ssize(job.ranks) ? "" : concat(" of ", job.job.world_size);
  std::vector<std::string> facts = {concat("job ", job.job.number),
                                    concat("up ", human_seconds(std::max(1.0, std::floor(job.seconds)))),
                                    concat(job.ranks.size(), of, of.empty() && one ? " rank" : " ranks")};
  if (job.samples_per_second > 0)
    facts.push_back(concat(with_thousands(std::llround(job.samples_per_second)), " samples/s"));
  if (job.job.nodes > 1) facts.push_back(concat("machine ", job.job.node_rank, " of ", job.job.nodes));
  return facts;
}

std::string server_text(const RankView& rank) {
  const ServerView& server = *rank.server;
  return concat("server ", rank.now.rank, ": ", server.clients, " clients, ", fixed(server.queue, 1),
                " requests in hand, ", std::lround(server.requests), " a second, ", human_seconds(server.ms / 1000),
                " each; delay ", fixed(server.mean_delay, 1), ", at most ", server.most_delay);
}

void add_folded(std::vector<Line>& lines, const std::string& text, int width, Style style) {
  for (const std::string& part : fold(text, width)) lines.push_back({part, style});
}

}  // namespace

std::vector<std::string> fold(const std::string& sentence, int width) {
  const std::size_t most = to_size(std::max(width, 1));
  std::vector<std::string> lines(1);
  for (std::string word : split(sentence, ' ')) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > most) lines.emplace_back();
    for (; word.size() > most; word.erase(0, most)) {
      lines.back() = word.substr(0, most);
      lines.emplace_back();
    }
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

std::vector<Line> lines_of(const JobView& job, int width, int skip) {
  std::vector<Line> lines = {{cut(job.job.command, width), Style::kTitle}, {as_many_as_fit(facts_of(job), width)}};
  for (const Verdict& verdict : job.verdicts)
    add_folded(lines, concat("> ", verdict.text), width, verdict.kind == "fine" ? Style::kFine : Style::kWarning);
  const std::vector<const Column*> columns = columns_within(width);
  lines.push_back(
      {cut(row(columns, [](const Column& column) { return std::string(column.name); }), width), Style::kHeading});
  for (std::size_t i = to_size(skip); i < job.ranks.size(); ++i)
    lines.push_back({cut(row(columns, [&](const Column& column) { return column.text(job.ranks[i]); }), width)});
  for (const RankView& rank : job.ranks)
    if (rank.server) add_folded(lines, server_text(rank), width, Style::kPlain);
  return lines;
}

std::string one_line_of(const JobView& job, int width) {
  std::vector<std::string> parts = facts_of(job);
  parts.insert(parts.begin() + 1, job.job.name);
  return as_many_as_fit(parts, width);
}

}  // namespace lockstep::top
