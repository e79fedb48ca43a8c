// bench/report.h: what every benchmark prints and keeps: medians, a table, the machine, the same as JSON.
//
// Threads: values
// Ranks:   no communication
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

namespace lockstep::bench {

double median(std::vector<double> values);  // of an even number, the mean of the middle two; requires one at least

std::string machine();  // "2 cores, AMD EPYC, AVX-512, Linux 6.1.0"

// Cells aligned to the right under their heads, the first column to the left.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) : rows_{std::move(heads)} {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Writes `result` and the machine it came from. Throws SystemError.
void save(const std::string& path, nlohmann::ordered_json result);

}  // namespace lockstep::bench
