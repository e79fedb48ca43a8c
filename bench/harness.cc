// SPDX-License-Identifier: Apache-2.0
#include "bench/harness.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <iomanip>
#include <iostream>
#include <string_view>

#include "lockstep/base/command_line.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

std::string vectors() {
  const std::string flags = proc_value("/proc/cpuinfo", "flags") + " ";
  if (flags.find(" avx512f ") != std::string::npos) return "AVX-512";
  return flags.find(" avx2 ") != std::string::npos ? "AVX2" : "no AVX2";
}

}  // namespace

double median_ratio(const Turns& above, const Turns& below) {
  Turns ratios;
  for (size_t turn = 0; turn < above.size(); ++turn) ratios.push_back(above[turn] / below[turn]);
  return median(ratios);
}

Json to_json(const Turns& turns) { return {{"median", median(turns)}, {"turns", turns}}; }

void Figures::add(const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) turns_[name].push_back(value);
}

double Figures::operator[](const std::string& name) const {
  const auto found = turns_.find(name);
  return found == turns_.end() ? 0 : median(found->second);
}

Json Figures::medians() const {
  Json json;
  for (const auto& [name, turns] : turns_) json[name] = median(turns);
  return json;
}

Json Figures::ranges() const {
  Json json;
  for (const auto& [name, turns] : turns_) json[name] = {std::ranges::min(turns), std::ranges::max(turns)};
  return json;
}

std::string machine() {
  utsname system{};
  ::uname(&system);
  const std::string_view kernel = system.release;
  const std::string model = proc_value("/proc/cpuinfo", "model name");
  return concat(usable_cores().size(), " cores, ", model.empty() ? system.machine : model, ", ", vectors(), ", Linux ",
                kernel.substr(0, kernel.find('-')));
}

double busy_seconds_of_cores() {
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, waits = 0, interrupts = 0, soft_interrupts = 0;
  file >> name >> user >> nice >> system >> idle >> waits >> interrupts >> soft_interrupts;
  if (!file || name != "cpu") throw SystemError({.what = "/proc/stat does not say how busy the cores are"});
  return (user + nice + system + interrupts + soft_interrupts) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 2); }
std::string microseconds(std::optional<double> seconds) { return seconds ? fixed(*seconds * 1e6, 2) : ""; }
std::string percent(double share, int digits) { return concat(fixed(100 * share, digits), "%"); }
std::string times(std::optional<double> ratio, int digits) { return ratio ? concat(fixed(*ratio, digits), "x") : ""; }

void Table::print(std::ostream& out) const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i)
      out << (i == 0 ? std::left : std::right) << std::setw(static_cast<int>(widths[i] + (i == 0 ? 0 : 2))) << row[i];
    out << '\n';
  }
  out.flush();
}

void show_progress(const std::string& text) {
  constexpr int kWidth = 70;
  std::cerr << '\r' << std::left << std::setw(kWidth) << text << (text.empty() ? "\r" : "") << std::flush;
}

Program::Program(const std::string& name, const std::string& description, int turns)
    : app_(description, "lockstep bench " + name), turns_(turns) {
  option("--turns", turns_, "how often each system has its turn at each case")->check(CLI::Range(1, 1000));
  app_.add_option("--json", json_, "file for the figures");
}

int Program::run(int argc, const char* const* argv, const std::function<void()>& body) {
  return parse_and_run(app_, argc, argv, [&] {
    body();
    return 0;
  });
}

void Program::take_turns(const std::string& what, const std::function<void(int turn)>& turn) const {
  for (int i = 0; i < turns_; ++i) {
    show_progress(concat(what, ", turn ", i + 1, " of ", turns_));
    turn(i);
  }
  show_progress("");
}

void Program::save(const Json& result) const {
  if (json_.empty()) return;
  Json all{{"machine", machine()}};
  all.update(result);
  write_file(json_, all.dump(2) + "\n");
}

}  // namespace lockstep::bench
