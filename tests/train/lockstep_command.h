// SPDX-License-Identifier: Apache-2.0
// tests/train/lockstep_command.h: runs the command, and has tables to train on.
#pragma once

#include "tests/launch/child.h"
#include "tests/support.h"
#include "tests/train/command.h"

namespace lockstep::testing {

inline Ended lockstep_command(const Words& words) {
  Words command = {LOCKSTEP_COMMAND};
  command.insert(command.end(), words.begin(), words.end());
  return run(command);
}

// The events of one kind in a file of metrics.
inline std::vector<nlohmann::json> lines_of(const std::filesystem::path& metrics, const std::string& event) {
  std::vector<nlohmann::json> lines = metrics_in(metrics);
  std::erase_if(lines, [&](const auto& line) { return line.at("event") != event; });
  return lines;
}

// Three classes by name, or a number, that a sum of two columns decides.
class TableTraining : public ::testing::Test {
 protected:
  TableTraining() {
    std::string classes = "x,y,kind\n", numbers = "x,y,sum\n";
    for (int i = 0; i < 300; ++i) {
      const int x = i * 7 % 100, y = i * 13 % 100, sum = x + y;
      classes += concat(x, ",", 1000 + y, ",", sum < 70 ? "low" : sum < 130 ? "middle" : "high", "\n");
      numbers += concat(x, ",", 1000 + y, ",", sum / 50.0, "\n");
    }
    write_file(folder / "classes.csv", classes);
    write_file(folder / "numbers.csv", numbers);
  }
  Ended train_on(const std::string& table, const std::string& metrics, const Words& more) {
    Words words = {"train",        "--threads", "1",  "--data",    "csv:" + folder.file(table),
                   "--quiet",      "--epochs",  "12", "--metrics", folder.file(metrics),
                   "--batch-size", "16"};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep_command(words);
  }
  TempFolder folder;
};

}  // namespace lockstep::testing
