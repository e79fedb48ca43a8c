// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/summary.h"

#include <algorithm>

#include "cli/compare/metrics.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"

namespace lockstep::compare {
namespace {

using bench::Turns;

// What one finished run has shown.
struct Result {
  const Run* run;
  Metrics metrics;
  double memory = 0;                 // bytes
  std::optional<double> link_bytes;  // of a step, of the busiest link in its busier direction
};

using Group = std::vector<Result>;

std::vector<Group> groups_of(const Folder& folder, const std::vector<Run>& runs) {
  std::vector<Group> groups;
  for (const Run& run : runs) {
    if (!folder.has_finished(run)) continue;
    const Json& entry = folder.entry(run);
    Result result{.run = &run,
                  .metrics = read_metrics(folder.of(run) / "metrics.jsonl"),
                  .memory = entry.value("peak_memory_bytes", 0.0)};
    if (const auto link = entry.find("busiest_link_bytes_per_step"); link != entry.end())
      result.link_bytes = std::max(link->value("sent", 0.0), link->value("received", 0.0));
    if (groups.empty() || groups.back().front().run->group != run.group) groups.emplace_back();
    groups.back().push_back(std::move(result));
  }
  return groups;
}

std::string value_in(const Run& run, const std::string& option) {
  const auto found = run.varied.find(option);
  return found == run.varied.end() ? "" : found->second;
}

// What the runs of `group` are compared with: `single` with the same model and batch; without it, the group's own
// contender on one device.
const Group* one_device(const std::vector<Group>& groups, const Group& group) {
  const Run& run = *group.front().run;
  const Group* found = nullptr;
  for (const Group& other : groups) {
    const Run& candidate = *other.front().run;
    if (candidate.devices != 1 || value_in(candidate, "model") != value_in(run, "model") ||
        value_in(candidate, "batch-size") != value_in(run, "batch-size"))
      continue;
    if (candidate.contender.name == "single") return &other;
    if (candidate.contender.name == run.contender.name && candidate.varied == run.varied) found = &other;
  }
  return found;
}

// ---- cells

// "12.3 ±0.4": the median, and half of what lies between the smallest and the largest.
std::string cell(const Turns& values, double unit, int digits) {
  if (values.empty()) return "";
  const auto [least, most] = std::ranges::minmax(values);
  const std::string median = fixed(bench::median(values) * unit, digits);
  return values.size() == 1 ? median : concat(median, " ±", fixed((most - least) / 2 * unit, digits));
}

template <class Get>
Turns turns_of(const Group& group, const Get& get) {
  Turns values;
  for (const Result& result : group)
    if (const std::optional<double> value = get(result)) values.push_back(*value);
  return values;
}

struct Column {
  std::string head;
  std::function<std::optional<double>(const Result&)> value;
  double unit = 1;
  int digits = 2;
};

std::optional<double> epoch_seconds(const Result& result) {
  const Turns& seconds = result.metrics.epoch_seconds;
  return seconds.empty() ? std::nullopt : std::optional(bench::median(seconds));
}

std::optional<double> last_accuracy(const Result& result) {
  const auto& accuracies = result.metrics.epoch_accuracies;
  return accuracies.empty() ? std::nullopt : accuracies.back();
}

const std::vector<Column>& columns() {
  constexpr double kMega = 1e-6;
  constexpr double kMebi = 1.0 / (1 << 20);
  static const std::vector<Column> all{
      {"samples/s", [](const Result& r) { return r.metrics.samples_per_second(); }, 1, 0},
      {"step ms", [](const Result& r) { return r.metrics.seconds_per_step(); }, 1e3, 1},
      {"epoch s", epoch_seconds, 1, 2},
      {"accuracy", last_accuracy, 1, 3},
      {"loss", [](const Result& r) { return r.metrics.loss(); }, 1, 3},
      {"MB/step", [](const Result& r) { return r.metrics.bytes_per_step(); }, kMega, 2},
      {"link MB/step", [](const Result& r) { return r.link_bytes; }, kMega, 2},
      {"memory MiB", [](const Result& r) { return std::optional(r.memory); }, kMebi, 0},
      {"waiting %", [](const Result& r) { return r.metrics.waiting(); }, 100, 0},
      {"bubble %", [](const Result& r) { return r.metrics.total("bubble"); }, 100, 0},
      {"formula %", [](const Result& r) { return r.metrics.total("ideal_bubble"); }, 100, 0},
      {"delay", [](const Result& r) { return r.metrics.total("mean_delay"); }, 1, 2},
      {"max delay", [](const Result& r) { return r.metrics.total("max_delay"); }, 1, 0},
  };
  return all;
}

// Each repeat beside the median of the repeats on one device.
std::string speed_up(const std::vector<Group>& groups, const Group& group) {
  const auto speed = [](const Result& r) { return r.metrics.samples_per_second(); };
  const Group* one = one_device(groups, group);
  const Turns alone = one == nullptr ? Turns{} : turns_of(*one, speed);
  return alone.empty() ? "" : cell(turns_of(group, speed), 1 / bench::median(alone), 2);
}

// Milliseconds of a step of p stages that share what `single` does evenly and wait for the bubble of the formula; no less
// than the cores that there are take for all of it.
std::string ideal_step(const Settings& settings, const std::vector<Group>& groups, const Group& group) {
  const auto bubble = group.front().metrics.total("ideal_bubble");
  const Group* one = one_device(groups, group);
  if (!bubble || one == nullptr) return "";
  const double at_once = std::max(1.0, static_cast<double>(usable_cores().size()) / settings.threads);
  const double devices = std::min(at_once, group.front().run->devices * (1 - *bubble));
  const Turns alone = turns_of(*one, [](const Result& r) { return r.metrics.seconds_per_step(); });
  return alone.empty() ? "" : fixed(bench::median(alone) * 1e3 / devices, 1);
}

// ---- tables

using Rows = std::vector<Words>;

// A column that is empty in every row is left out.
void print(std::ostream& out, const Words& heads, const Rows& rows) {
  std::vector<std::size_t> used;
  for (std::size_t column = 0; column < heads.size(); ++column)
    if (std::ranges::any_of(rows, [column](const Words& row) { return !row[column].empty(); })) used.push_back(column);
  const auto kept = [&used](const Words& row) {
    Words cells;
    for (const std::size_t column : used) cells.push_back(row[column]);
    return cells;
  };
  out << "| " << join(kept(heads), " | ") << " |\n|" << join(Words(used.size(), " --- "), "|") << "|\n";
  for (const Words& row : rows) out << "| " << join(kept(row), " | ") << " |\n";
}

void print_results(std::ostream& out, const Settings& settings, const std::vector<Group>& groups) {
  Words heads{"", "runs", "speed-up", "ideal step ms"};
  for (const Column& column : columns()) heads.push_back(column.head);
  Rows rows;
  for (const Group& group : groups) {
    rows.push_back(
        {group.front().run->group, concat(group.size()), speed_up(groups, group), ideal_step(settings, groups, group)});
    for (const Column& column : columns())
      rows.back().push_back(cell(turns_of(group, column.value), column.unit, column.digits));
  }
  print(out, heads, rows);
}

// Accuracy after each epoch and the seconds of training up to there.
std::string epoch_cell(const Group& group, std::size_t epoch) {
  const Turns accuracies = turns_of(group, [epoch](const Result& result) {
    const auto& all = result.metrics.epoch_accuracies;
    return epoch < all.size() ? all[epoch] : std::nullopt;
  });
  const Turns seconds = turns_of(group, [epoch](const Result& result) {
    const Turns& all = result.metrics.epoch_seconds;
    double sum = 0;
    for (std::size_t i = 0; i <= epoch && i < all.size(); ++i) sum += all[i];
    return epoch < all.size() ? std::optional(sum) : std::nullopt;
  });
  return accuracies.empty() ? "" : concat(cell(accuracies, 1, 3), " at ", cell(seconds, 1, 1), " s");
}

void print_epochs(std::ostream& out, const std::vector<Group>& groups) {
  constexpr std::size_t kMost = 10;  // columns
  Words heads{""};
  for (std::size_t epoch = 1; epoch <= kMost; ++epoch) heads.push_back(concat("accuracy after epoch ", epoch));
  Rows rows;
  for (const Group& group : groups) {
    rows.push_back({group.front().run->group});
    for (std::size_t epoch = 0; epoch < kMost; ++epoch) rows.back().push_back(epoch_cell(group, epoch));
  }
  if (std::ranges::any_of(rows, [](const Words& row) { return !row[2].empty(); })) {
    out << '\n';
    print(out, heads, rows);
  }
}

// K: what one step of ddp exchanges.
std::optional<double> gradient_bytes(const std::vector<Group>& groups) {
  for (const Group& group : groups)
    if (group.front().run->contender.strategy == "ddp")
      if (const auto bytes = group.front().metrics.bytes_per_step(); bytes && *bytes > 0) return bytes;
  return std::nullopt;
}

void print_formulas(std::ostream& out, const Settings& settings, const std::vector<Group>& groups) {
  const auto gradient = gradient_bytes(groups);
  if (settings.links != Links::kShaped || !gradient) return;
  const double rate = settings.link.megabits_per_second * 1e6 / 8;
  Rows rows;
  for (const Group& group : groups) {
    const Run& run = *group.front().run;
    if (run.contender.busiest == nullptr) continue;
    const double bytes = *gradient * run.contender.busiest(run.devices, run.contender.servers);
    rows.push_back({run.group, cell(turns_of(group, [](const Result& r) { return r.link_bytes; }), 1e-6, 2),
                    fixed(bytes / 1e6, 2), run.contender.formula,
                    cell(turns_of(group, [](const Result& r) { return r.metrics.seconds_per_step(); }), 1e3, 1),
                    fixed(bytes / rate * 1e3, 1)});
  }
  out << "\nN workers, a host each, links of " << fixed(settings.link.megabits_per_second, 0)
      << " Mb/s; K = " << fixed(*gradient / 1e6, 2)
      << " MB of gradient. limit: the formula's bytes at the link's rate, both directions at once.\n\n";
  print(out, {"", "busiest link, MB/step", "formula MB", "formula", "step ms", "limit ms"}, rows);
}

void print_failures(std::ostream& out, const Folder& folder, const std::vector<Run>& runs) {
  if (folder.count("failed") > 0) out << '\n';
  for (const Run& run : runs)
    if (const Json& entry = folder.entry(run); entry.at("state") == "failed")
      out << "- failed: " << run.name << ": " << entry.value("why", "") << "; "
          << (folder.of(run) / "output.txt").string() << " says more\n";
}

}  // namespace

void print_summary(std::ostream& out, const Settings& settings, const Folder& folder, const std::vector<Run>& runs) {
  const std::vector<Group> groups = groups_of(folder, runs);
  if (!groups.empty()) {
    const bool one_model = value_in(*groups.front().front().run, "model").empty();
    out << settings.experiment << ": " << (one_model ? settings.model + ", " : "") << settings.threads << " thread"
        << (settings.threads == 1 ? "" : "s") << " per device; " << bench::machine()
        << "\nThe number in a name is that of devices. Medians over the seeds, ± half of the range.\n\n";
    print_results(out, settings, groups);
    print_epochs(out, groups);
    print_formulas(out, settings, groups);
  }
  print_failures(out, folder, runs);
}

}  // namespace lockstep::compare
