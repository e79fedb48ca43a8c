// SPDX-License-Identifier: Apache-2.0
// bench/harness.h: what every benchmark does in the same way: it reads its options, lets the systems take turns, keeps
// the figure of every turn, and shows medians and ratios as a table and as JSON.
//
// Flow:    Program reads the options -> take_turns() measures -> Figures -> Table on stdout, save() to a file
// Threads: one
// Ranks:   no communication
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/median.h"

namespace lockstep::bench {

using Json = nlohmann::ordered_json;
using Turns = std::vector<double>;  // one figure per turn

using lockstep::median;

// The median over the turns of how many times as large `above` is. Both have the same number of turns, at least one.
double median_ratio(const Turns& above, const Turns& below);

Json to_json(const Turns& turns);  // {"median": ..., "turns": [...]}

// The turns of several systems or phases, by name.
class Figures {
 public:
  void add(const std::map<std::string, double>& values);
  double operator[](const std::string& name) const;  // the median; 0: never measured
  Json medians() const;
  Json ranges() const;  // {name: [smallest, largest]}

 private:
  std::map<std::string, Turns> turns_;
};

std::string machine();  // "2 cores, AMD EPYC, AVX-512, Linux 6.1.0"

// Seconds that the cores of this machine have worked since it started, for whomever; a multiple of 0.01. Throws SystemError.
double busy_seconds_of_cores();

std::string milliseconds(double seconds);                        // "1.25"
std::string microseconds(std::optional<double> seconds);         // "1.25"; "" for none
std::string percent(double share, int digits = 0);               // "97%"
std::string times(std::optional<double> ratio, int digits = 2);  // "1.25x"; "" for none

// Cells aligned to the right under their heads, the first column to the left.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) : rows_{std::move(heads)} {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Shows `text` on stderr in place of the last one; an empty text leaves the line blank.
void show_progress(const std::string& text);

// The command line of one benchmark. Every benchmark has --turns and --json.
class Program {
 public:
  Program(const std::string& name, const std::string& description, int turns);

  // An option with a default value, which --help shows.
  template <class T>
  CLI::Option* option(const std::string& name, T& value, const std::string& help) {
    return app_.add_option(name, value, help)->capture_default_str();
  }
  // A list with commas between its values.
  template <class T>
  CLI::Option* list(const std::string& name, std::vector<T>& values, const std::string& help) {
    return option(name, values, help)->delimiter(',');
  }
  CLI::Option* flag(const std::string& name, bool& value, const std::string& help) {
    return app_.add_flag(name, value, help);
  }

  // Parses the command line, calls `body` and returns the exit code: 0, or 2 after options that make no sense, which are
  // named on stderr.
  int run(int argc, const char* const* argv, const std::function<void()>& body);

  int turns() const { return turns_; }
  // Calls `turn` --turns times. Each call measures every system once, so that what else happens on the machine meets
  // all of them.
  void take_turns(const std::string& what, const std::function<void(int turn)>& turn) const;
  // Writes `result` and the machine it came from to the file of --json, if there is one. Throws SystemError.
  void save(const Json& result) const;

 private:
  CLI::App app_;
  int turns_;
  std::string json_;
};

// Those of `cases` whose `name` is among `names`; all of them if `names` is empty.
template <class Case>
std::vector<Case> chosen(const std::vector<Case>& cases, const std::vector<std::string>& names) {
  std::vector<Case> result;
  for (const Case& one : cases)
    if (names.empty() || std::ranges::count(names, one.name) > 0) result.push_back(one);
  return result;
}

template <class Case>
std::vector<std::string> names_of(const std::vector<Case>& cases) {
  std::vector<std::string> names;
  for (const Case& one : cases) names.push_back(one.name);
  return names;
}

// The benchmarks of `lockstep bench`. Each gets argv from its own name on, prints its table on stdout and returns the exit
// code; lockstep::Error is main's to print (cli/bench.cc).
int bench_collectives(int argc, const char* const* argv);
int bench_step(int argc, const char* const* argv);
int bench_scaling(int argc, const char* const* argv);
int bench_data(int argc, const char* const* argv);
int bench_hosts(int argc, const char* const* argv);
int bench_memory(int argc, const char* const* argv);
int bench_plan(int argc, const char* const* argv);

}  // namespace lockstep::bench
