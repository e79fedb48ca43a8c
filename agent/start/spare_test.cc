// SPDX-License-Identifier: Apache-2.0
#include "agent/start/spare.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Command = std::vector<std::string>;

// What stands before and after the text that imports and waits.
std::pair<Command, Command> around_the_wait(const Command& program) {
  const Command command = spare_command(program);
  const auto option = std::ranges::find(command, "-c");
  if (option == command.end()) return {};
  return {{command.begin(), option}, {option + 2, command.end()}};
}

TEST(Spare, keeps_options_of_python_and_arguments_of_the_program) {
  using Parts = std::pair<Command, Command>;
  EXPECT_EQ(around_the_wait({"python", "train.py", "--lr", "0.1"}), (Parts{{"python"}, {"train.py", "--lr", "0.1"}}));
  EXPECT_EQ(around_the_wait({"/usr/bin/python3.11", "-u", "-W", "ignore", "train.py", "-c"}),
            (Parts{{"/usr/bin/python3.11", "-u", "-W", "ignore"}, {"train.py", "-c"}}));
  EXPECT_EQ(around_the_wait({"python3", "-X", "dev", "-m", "package.train", "x"}),
            (Parts{{"python3", "-X", "dev"}, {"-m", "package.train", "x"}}));
}

TEST(Spare, is_for_python_programs_with_a_file_or_a_module) {
  for (const Command& other : std::vector<Command>{{},
                                                   {"python"},
                                                   {"./train", "x"},
                                                   {"python", "-c", "print(1)"},
                                                   {"python", "-"},
                                                   {"python", "-u"},
                                                   {"env", "python", "train.py"}})
    EXPECT_TRUE(spare_command(other).empty());
}

}  // namespace
}  // namespace lockstep
