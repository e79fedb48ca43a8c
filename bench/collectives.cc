// `lockstep bench collectives`: every collective of the shared-memory core beside Gloo, Open MPI and MPICH, in turn.
#include <iostream>
#include <map>
#include <optional>

#include "bench/benchmarks.h"
#include "bench/collectives/cases.h"
#include "bench/collectives/loopback.h"
#include "bench/collectives/systems.h"
#include "bench/command_line.h"
#include "bench/report.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

const std::vector<std::string> kAlgorithms{"direct", "central", "ring", "tree"};
const std::vector<std::string> kMemories{"arena", "ordinary"};
constexpr const char* kLockstep = "lockstep";
constexpr const char* kMemcpy = "memcpy";

struct Options {
  std::vector<int> ranks{2};
  std::vector<std::string> operations = bench::operations();
  std::vector<std::string> algorithms{"direct"};
  std::vector<std::string> memories = kMemories;
  std::string dtype = "float32";
  std::size_t max_bytes = std::size_t{256} << 20;
  int turns = 3;
  bool full = false;
  std::string json;
};

// What one column of the table shows.
struct Column {
  std::string name;  // "arena", "ordinary ring", "Gloo"
  std::string memory;
  std::string algorithm;
};

std::vector<Column> lockstep_columns(const Options& options) {
  std::vector<Column> columns;
  for (const std::string& algorithm : options.algorithms)
    for (const std::string& memory : options.memories)
      columns.push_back({algorithm == "direct" ? memory : concat(memory, " ", algorithm), memory, algorithm});
  return columns;
}

// all_reduce at every size; the others, unless all are asked for, at five.
std::vector<std::size_t> sizes_of(const std::string& operation, const Options& options) {
  if (operation == "barrier") return {0};
  std::vector<std::size_t> sizes;
  const bool all = options.full || operation == "all_reduce";
  for (std::size_t bytes = 4; bytes <= options.max_bytes; bytes *= 4) {
    const bool one_of_five = bytes == 4 || bytes == 4096 || bytes == 262144 || bytes == 4194304 || bytes == 67108864;
    if (all || one_of_five) sizes.push_back(bytes);
  }
  return sizes;
}

std::vector<Case> cases_of(const Options& options) {
  std::vector<Case> cases;
  for (const std::string& operation : options.operations)
    for (const std::size_t bytes : sizes_of(operation, options))
      cases.push_back({.operation = operation, .bytes = bytes, .dtype = options.dtype});
  return cases;
}

Case in_column(Case one, const Column& column) {
  one.memory = column.memory;
  one.algorithm = column.algorithm;
  return one;
}

// All turns of all systems at all cases.
class Results {
 public:
  void add(const std::string& system, const Case& one, std::optional<double> seconds) {
    if (seconds) all_[system][to_word(one)].push_back(*seconds);
  }

  // The median over the turns.
  std::optional<double> find(const std::string& system, const Case& one) const {
    const Turns* const turns = turns_of(system, one);
    return turns == nullptr ? std::nullopt : std::optional(median(*turns));
  }

  // The median of how many times as long as `ours` it took, turn by turn.
  std::optional<double> ratio(const std::string& peer, const Case& theirs, const Case& ours) const {
    const Turns* const above = turns_of(peer, theirs);
    const Turns* const below = turns_of(kLockstep, ours);
    if (above == nullptr || below == nullptr) return std::nullopt;
    Turns ratios;
    for (std::size_t turn = 0; turn < above->size(); ++turn) ratios.push_back((*above)[turn] / (*below)[turn]);
    return median(ratios);
  }

  nlohmann::ordered_json to_json() const {
    nlohmann::ordered_json json;
    for (const auto& [system, words] : all_)
      for (const auto& [word, turns] : words) json[system][word] = {{"median", median(turns)}, {"turns", turns}};
    return json;
  }

 private:
  using Turns = std::vector<double>;

  const Turns* turns_of(const std::string& system, const Case& one) const {
    const auto of_system = all_.find(system);
    if (of_system == all_.end()) return nullptr;
    const auto turns = of_system->second.find(to_word(one));
    return turns == of_system->second.end() ? nullptr : &turns->second;
  }

  std::map<std::string, std::map<std::string, Turns>> all_;
};

Case copy_of(const Case& one) { return {.operation = kMemcpy, .bytes = one.bytes, .dtype = one.dtype}; }

// Every system in turn, at every case, several times: what changes meanwhile on the machine meets all of them.
Results measure(const Options& options, int ranks, const std::vector<Peer>& here) {
  const RunningSystemPtr ours = start_lockstep(ranks);
  std::vector<RunningSystemPtr> theirs;
  for (const Peer& peer : here) theirs.push_back(peer.start(ranks));
  Results results;
  for (const Case& one : cases_of(options)) {
    std::cerr << "\r" << ranks << " ranks: " << one.operation << ' ' << one.bytes << "              " << std::flush;
    for (int turn = 0; turn < options.turns; ++turn) {
      for (const Column& column : lockstep_columns(options))
        results.add(kLockstep, in_column(one, column), ours->seconds(to_word(in_column(one, column))));
      for (const RunningSystemPtr& peer : theirs) results.add(peer->name(), one, peer->seconds(to_word(one)));
      results.add(kLockstep, copy_of(one), ours->seconds(to_word(copy_of(one))));
    }
  }
  std::cerr << "\r" << std::string(60, ' ') << "\r";
  return results;
}

// How many of a case's bytes the busiest rank has to read and write, as a copy: with p ranks it reads K and writes K
// (all_reduce: K/p of p arrays in, and into p arrays out).
double copied_share(const std::string& operation, int ranks) {
  if (operation == "barrier") return 0;
  if (operation == "scatter") return 1.0 / ranks;
  if (operation == "reduce" || operation == "reduce_scatter") return (1 + 1.0 / ranks) / 2;
  return 1;
}

std::string times(std::optional<double> ratio) { return ratio ? concat(fixed(*ratio, 1), "x") : ""; }
std::string microseconds(std::optional<double> seconds) { return seconds ? fixed(*seconds * 1e6, 2) : ""; }

class Page {
 public:
  Page(const Options& options, int ranks, const std::vector<Peer>& here, const Results& results)
      : options_(options), ranks_(ranks), here_(here), results_(results) {}

  void print(std::ostream& out) const {
    Table table(heads());
    for (const Case& one : cases_of(options_)) table.add(row(one));
    out << '\n' << ranks_ << " ranks, " << options_.dtype << ", microseconds\n";
    table.print(out);
  }

 private:
  std::vector<std::string> heads() const {
    std::vector<std::string> heads{"operation", "bytes"};
    for (const Column& column : lockstep_columns(options_))
      heads.insert(heads.end(), {column.name, "/Gloo", "/best", "GB/s", "limit"});
    for (const Peer& peer : here_) heads.push_back(peer.name);
    heads.emplace_back(kMemcpy);
    return heads;
  }

  std::vector<std::string> row(const Case& one) const {
    std::vector<std::string> cells{one.operation,
                                   one.bytes > 0 ? with_thousands(static_cast<std::int64_t>(one.bytes)) : ""};
    const auto copy = results_.find(kLockstep, copy_of(one));
    for (const Column& column : lockstep_columns(options_)) {
      const auto ours = results_.find(kLockstep, in_column(one, column));
      cells.push_back(microseconds(ours));
      cells.push_back(times(results_.ratio("Gloo", one, in_column(one, column))));
      cells.push_back(times(ratio_to_best(one, in_column(one, column))));
      cells.push_back(ours && one.bytes > 0 ? fixed(static_cast<double>(one.bytes) / *ours / 1e9, 2) : "");
      cells.push_back(share_of_limit(one, ours, copy));
    }
    for (const Peer& peer : here_) cells.push_back(microseconds(results_.find(peer.name, one)));
    cells.push_back(microseconds(copy));
    return cells;
  }

  std::optional<double> ratio_to_best(const Case& theirs, const Case& ours) const {
    std::optional<double> least;
    for (const Peer& peer : here_)
      if (const auto ratio = results_.ratio(peer.name, theirs, ours); ratio && (!least || *ratio < *least))
        least = ratio;
    return least;
  }

  std::string share_of_limit(const Case& one, std::optional<double> ours, std::optional<double> copy) const {
    if (!ours || !copy) return "";
    return concat(fixed(100 * *copy * copied_share(one.operation, ranks_) / *ours, 0), "%");
  }

  const Options& options_;
  int ranks_;
  const std::vector<Peer>& here_;
  const Results& results_;
};

void add_options(CLI::App& app, Options& options) {
  app.add_option("--ranks", options.ranks, "numbers of processes, such as 2,4,8")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--operation", options.operations, "only these")->delimiter(',')->check(CLI::IsMember(operations()));
  app.add_option("--algorithm", options.algorithms, "of lockstep's all_reduce: direct, central, ring, tree")
      ->delimiter(',')
      ->check(CLI::IsMember(kAlgorithms))
      ->capture_default_str();
  app.add_option("--memory", options.memories, "of lockstep's arrays: arena (World::allocate), ordinary")
      ->delimiter(',')
      ->check(CLI::IsMember(kMemories))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "of the elements")->check(CLI::IsMember(dtypes()))->capture_default_str();
  app.add_option("--max-bytes", options.max_bytes, "the largest array")->capture_default_str();
  app.add_option("--turns", options.turns, "how often each system has its turn at each case")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_flag("--full", options.full, "2, 4 and 8 ranks, every algorithm, every operation at every size");
  app.add_option("--json", options.json, "file for the figures");
}

void print_head(const std::vector<Peer>& all) {
  std::cout << machine() << "\nloopback round trip: " << fixed(loopback_round_trip() * 1e6, 1) << " us\n"
            << "Each figure: the slowest rank, median over turns. /Gloo and /best (peer): how many times as long the "
               "peer took,\n"
               "median over turns. limit: what all ranks copying that many bytes at the same time took, as a share.\n";
  for (const Peer& peer : all)
    if (!peer.missing.empty()) std::cout << peer.name << " is missing: " << peer.missing << '\n';
}

void run(const Options& options) {
  const std::vector<Peer> all = peers();
  std::vector<Peer> here;
  for (const Peer& peer : all)
    if (peer.missing.empty()) here.push_back(peer);
  print_head(all);
  nlohmann::ordered_json json{{"turns", options.turns}};
  for (const int ranks : options.ranks) {
    const Results results = measure(options, ranks, here);
    Page(options, ranks, here, results).print(std::cout);
    json["seconds"][concat(ranks, " ranks")] = results.to_json();
  }
  if (!options.json.empty()) save(options.json, json);
}

}  // namespace

int bench_collectives(int argc, const char* const* argv) {
  CLI::App app("Every collective of the shared-memory core beside Gloo, Open MPI and MPICH, in turn.",
               "lockstep bench collectives");
  Options options;
  add_options(app, options);
  if (const auto exit_code = parse(app, argc, argv)) return *exit_code;
  if (options.full && app.count("--ranks") == 0) options.ranks = {2, 4, 8};
  if (options.full && app.count("--algorithm") == 0) options.algorithms = kAlgorithms;
  run(options);
  return 0;
}

}  // namespace lockstep::bench
