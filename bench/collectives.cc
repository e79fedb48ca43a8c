// SPDX-License-Identifier: Apache-2.0
// `lockstep bench collectives`: every collective of the shared-memory core beside Gloo, Open MPI, MPICH and oneCCL, in turn.
#include <iostream>

#include "bench/collectives/cases.h"
#include "bench/collectives/systems.h"
#include "bench/harness.h"
#include "bench/tcp.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

const std::vector<std::string> kMemories{"arena", "ordinary"};
constexpr const char* kLockstep = "lockstep";
constexpr const char* kMemcpy = "memcpy";

struct CollectivesOptions {
  std::vector<int> ranks{2};
  std::vector<std::string> operations = bench::operations();
  std::vector<std::string> memories = kMemories;
  std::string dtype = "float32";
  size_t max_bytes = size_t{256} << 20;
};

// all_reduce at every size, the others at five.
std::vector<size_t> sizes_of(const std::string& operation, const CollectivesOptions& options) {
  if (operation == "barrier") return {0};
  std::vector<size_t> sizes;
  for (size_t bytes = 4; bytes <= options.max_bytes; bytes *= 4) {
    const bool one_of_five = bytes == 4 || bytes == 4096 || bytes == 262144 || bytes == 4194304 || bytes == 67108864;
    if (operation == "all_reduce" || one_of_five) sizes.push_back(bytes);
  }
  return sizes;
}

std::vector<Case> cases_of(const CollectivesOptions& options) {
  std::vector<Case> cases;
  for (const std::string& operation : options.operations)
    for (const size_t bytes : sizes_of(operation, options))
      cases.push_back({.operation = operation, .bytes = bytes, .dtype = options.dtype});
  return cases;
}

Case in_memory(Case one, const std::string& memory) {
  one.memory = memory;
  return one;
}

// The turns of each system at each case, which is named by its word.
using Results = std::map<std::string, std::map<std::string, Turns>>;

// Empty: never measured.
Turns turns_of(const Results& results, const std::string& system, const Case& one) {
  const auto found = results.find(system);
  if (found == results.end() || !found->second.contains(to_word(one))) return {};
  return found->second.at(to_word(one));
}

std::optional<double> seconds_of(const Results& results, const std::string& system, const Case& one) {
  const Turns turns = turns_of(results, system, one);
  return turns.empty() ? std::nullopt : std::optional(median(turns));
}

// How many times as long as `ours` the peer took.
std::optional<double> ratio_to(const Results& results, const std::string& peer, const Case& theirs, const Case& ours) {
  const Turns above = turns_of(results, peer, theirs);
  const Turns below = turns_of(results, kLockstep, ours);
  return above.empty() || below.empty() ? std::nullopt : std::optional(median_ratio(above, below));
}

Json to_json(const Results& results) {
  Json json;
  for (const auto& [system, cases] : results)
    for (const auto& [word, turns] : cases) json[system][word] = bench::to_json(turns);
  return json;
}

Case copy_of(const Case& one) { return {.operation = kMemcpy, .bytes = one.bytes, .dtype = one.dtype}; }

Results measure(const Program& program, const CollectivesOptions& options, int ranks, const std::vector<Peer>& here) {
  const RunningSystemPtr ours = start_lockstep(ranks);
  std::vector<RunningSystemPtr> theirs;
  for (const Peer& peer : here) theirs.push_back(peer.start(ranks));
  Results results;
  const auto run = [&](const RunningSystemPtr& system, const Case& one) {
    if (const auto seconds = system->seconds(to_word(one))) results[system->name()][to_word(one)].push_back(*seconds);
  };
  for (const Case& one : cases_of(options))
    program.take_turns(concat(ranks, " ranks: ", one.operation, " ", one.bytes), [&](int) {
      for (const std::string& memory : options.memories) run(ours, in_memory(one, memory));
      for (const RunningSystemPtr& peer : theirs) run(peer, one);
      run(ours, copy_of(one));
    });
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

struct Page {
  const CollectivesOptions& options;
  int ranks;
  const std::vector<Peer>& here;
  const Results& results;
};

std::vector<std::string> heads_of(const Page& page) {
  std::vector<std::string> heads{"operation", "bytes"};
  for (const std::string& memory : page.options.memories)
    heads.insert(heads.end(), {memory, "/Gloo", "/best", "GB/s", "limit"});
  for (const Peer& peer : page.here) heads.push_back(peer.name);
  heads.emplace_back(kMemcpy);
  return heads;
}

std::optional<double> ratio_to_best(const Page& page, const Case& theirs, const Case& ours) {
  std::optional<double> least;
  for (const Peer& peer : page.here)
    if (const auto ratio = ratio_to(page.results, peer.name, theirs, ours); ratio && (!least || *ratio < *least))
      least = ratio;
  return least;
}

std::vector<std::string> row_of(const Page& page, const Case& one) {
  const auto& results = page.results;
  std::vector<std::string> cells{one.operation, one.bytes > 0 ? with_thousands(static_cast<int64_t>(one.bytes)) : ""};
  const auto copy = seconds_of(results, kLockstep, copy_of(one));
  for (const std::string& memory : page.options.memories) {
    const Case mine = in_memory(one, memory);
    const auto ours = seconds_of(results, kLockstep, mine);
    cells.push_back(microseconds(ours));
    cells.push_back(times(ratio_to(results, "Gloo", one, mine), 1));
    cells.push_back(times(ratio_to_best(page, one, mine), 1));
    cells.push_back(ours && one.bytes > 0 ? fixed(static_cast<double>(one.bytes) / *ours / 1e9, 2) : "");
    cells.push_back(ours && copy ? percent(*copy * copied_share(one.operation, page.ranks) / *ours) : "");
  }
  for (const Peer& peer : page.here) cells.push_back(microseconds(seconds_of(results, peer.name, one)));
  cells.push_back(microseconds(copy));
  return cells;
}

void print(const Page& page, std::ostream& out) {
  Table table(heads_of(page));
  for (const Case& one : cases_of(page.options)) table.add(row_of(page, one));
  out << '\n' << page.ranks << " ranks, " << page.options.dtype << ", microseconds\n";
  table.print(out);
}

void add_options(Program& program, CollectivesOptions& options) {
  program.list("--ranks", options.ranks, "numbers of processes, such as 2,4,8");
  program.list("--operation", options.operations, "only these")->check(CLI::IsMember(operations()));
  program.list("--memory", options.memories, "of lockstep's arrays: arena (World::allocate), ordinary")
      ->check(CLI::IsMember(kMemories));
  program.option("--dtype", options.dtype, "of the elements")->check(CLI::IsMember(dtypes()));
  program.option("--max-bytes", options.max_bytes, "the largest array");
}

void print_head(const std::vector<Peer>& all) {
  std::cout << machine() << "\nloopback round trip: " << fixed(loopback_round_trip() * 1e6, 1) << " us\n"
            << "Each figure: the slowest rank, median over turns. /Gloo and /best (peer): how many times as long the "
               "peer took,\n"
               "median over turns. limit: what all ranks copying that many bytes at the same time took, as a share.\n";
  for (const Peer& peer : all)
    if (!peer.missing.empty()) std::cout << peer.name << " is missing: " << peer.missing << '\n';
}

void run(const Program& program, const CollectivesOptions& options) {
  const std::vector<Peer> all = peers();
  std::vector<Peer> here;
  for (const Peer& peer : all)
    if (peer.missing.empty()) here.push_back(peer);
  print_head(all);
  Json json{{"turns", program.turns()}};
  for (const int ranks : options.ranks) {
    const Results results = measure(program, options, ranks, here);
    print(Page{options, ranks, here, results}, std::cout);
    json["seconds"][concat(ranks, " ranks")] = to_json(results);
  }
  program.save(json);
}

}  // namespace

int bench_collectives(int argc, const char* const* argv) {
  CollectivesOptions options;
  Program program("collectives",
                  "Every collective of the shared-memory core beside Gloo, Open MPI, MPICH and oneCCL, in turn.", 3);
  add_options(program, options);
  return program.run(argc, argv, [&] { run(program, options); });
}

}  // namespace lockstep::bench
