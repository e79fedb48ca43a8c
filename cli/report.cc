// SPDX-License-Identifier: Apache-2.0
// `lockstep report`: one HTML file about one or several runs, or about a comparison.
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/report/page.h"
#include "cli/report/runs.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

void require_html(const std::string& output) {
  if (!output.ends_with(".html") && !output.ends_with(".htm"))
    throw UsageError({.what = concat("--output ", output, " does not end in .html"),
                      .likely = "the name of a metrics file in its place",
                      .next = "give --output FILE.html"});
}

int write_report(const std::vector<std::string>& runs, const std::string& output) {
  require_html(output);
  const report::Json data = report::read_runs(runs);
  const std::string page = report::page_of(data);
  write_file(output, page);
  std::size_t partial = 0;
  for (const auto& run : data["runs"]) {
    for (const auto& text : run["partial"])
      std::cerr << run["name"].get<std::string>() << ": " << text.get<std::string>() << '\n';
    partial += run["partial"].empty() ? 0 : 1;
  }
  const std::size_t count = data["runs"].size(), benchmarks = data["benchmarks"].size();
  std::cout << output << ": " << count << (count == 1 ? " run" : " runs");
  if (benchmarks > 0) std::cout << ", " << benchmarks << (benchmarks == 1 ? " benchmark" : " benchmarks");
  if (partial > 0) std::cout << ", " << partial << " partial";
  std::cout << ", " << human_bytes(page.size()) << std::endl;
  return 0;
}

}  // namespace

int report_command(int argc, char** argv) {
  CLI::App app("Makes a page of curves and tables about runs, for any browser, without network", "lockstep report");
  app.option_defaults()->always_capture_default();
  std::vector<std::string> runs;
  std::string output = "report.html";
  app.add_option(
         "RUN", runs,
         "[NAME=]METRICS[,TRACE]: files of lockstep train --metrics and --trace FILE.json; a trace alone; a folder "
         "with metrics.jsonl; the folder of a comparison; the file of lockstep bench step --json")
      ->required();
  app.add_option("--output", output, "the file to write");
  return parse_and_run(app, argc, argv, [&] { return write_report(runs, output); });
}

}  // namespace lockstep
