#include "bench/report.h"

#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <string_view>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"

namespace lockstep::bench {
namespace {

// The first line of /proc/cpuinfo that begins with `key`, after the colon.
std::string cpu_info(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key) && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  return "";
}

std::string vectors() {
  const std::string flags = cpu_info("flags") + " ";
  if (flags.find(" avx512f ") != std::string::npos) return "AVX-512";
  return flags.find(" avx2 ") != std::string::npos ? "AVX2" : "no AVX2";
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::string machine() {
  utsname system{};
  ::uname(&system);
  const std::string_view kernel = system.release;
  const std::string model = cpu_info("model name");
  return concat(usable_cores().size(), " cores, ", model.empty() ? system.machine : model, ", ", vectors(), ", Linux ",
                kernel.substr(0, kernel.find('-')));
}

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i)
      out << (i == 0 ? std::left : std::right) << std::setw(static_cast<int>(widths[i] + (i == 0 ? 0 : 2))) << row[i];
    out << '\n';
  }
  out.flush();
}

void save(const std::string& path, nlohmann::ordered_json result) {
  nlohmann::ordered_json all{{"machine", machine()}};
  all.update(result);
  write_file(path, all.dump(2) + "\n");
}

}  // namespace lockstep::bench
