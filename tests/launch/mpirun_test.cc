// SPDX-License-Identifier: Apache-2.0
// The real launchers: every rank of an mpirun finds its place in the job, and only that job.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>

#include "lockstep/base/text.h"
#include "tests/launch/child.h"

namespace lockstep::testing {
namespace {

using Words = std::vector<std::string>;
using Settings = std::map<std::string, std::string>;

Words words_of(const std::string& line) {
  Words words;
  for (const std::string& word : split(line, ' '))
    if (!word.empty()) words.push_back(word);
  return words;
}

Settings read_settings(const std::string& path) {
  std::ifstream in(path);
  Settings settings;
  for (std::string line; std::getline(in, line);)
    if (const Words words = words_of(line); words.size() >= 2) settings[words[0]] = words[1];
  return settings;
}

// One job in which every rank writes what `lockstep env` shows to a file of its own, from inside a shell.
struct Job {
  Job(const std::string& mpirun, int ranks) {
    Words command = words_of(mpirun);
    const std::string script = concat(LOCKSTEP_COMMAND, " env > ", folder.path(), "/$$; exit $?");
    command.insert(command.end(), {"-np", concat(ranks), "sh", "-c", script});
    Child child(command);
    exit_code = child.wait();
    error = child.error();
    for (const auto& file : std::filesystem::directory_iterator(folder.path()))
      settings.push_back(read_settings(file.path()));
  }

  std::multiset<std::string> all(const std::string& name) const {
    std::multiset<std::string> values;
    for (const Settings& of_rank : settings) values.insert(of_rank.at(name));
    return values;
  }

  TempFolder folder;
  int exit_code = -1;
  std::string error;
  std::vector<Settings> settings;
};

void expect_complete(const Job& job, const std::string& launcher, int ranks) {
  ASSERT_EQ(job.exit_code, 0) << job.error;
  std::multiset<std::string> each_once;
  for (int rank = 0; rank < ranks; ++rank) each_once.insert(concat(rank));
  EXPECT_EQ(job.all("rank"), each_once);
  EXPECT_EQ(job.all("local_rank"), each_once);
  EXPECT_EQ(job.all("world_size").count(concat(ranks)), each_once.size());
  EXPECT_EQ(job.all("local_size").count(concat(ranks)), each_once.size());
  EXPECT_EQ(job.all("node_rank").count("0"), each_once.size());
  EXPECT_EQ(job.all("launcher").count(launcher), each_once.size());
  EXPECT_EQ(job.all("job_id").count(*job.all("job_id").begin()), each_once.size());
}

struct Launcher {
  const char* name;     // as lockstep calls it
  const char* command;  // how it starts ranks
};

class Mpirun : public ::testing::TestWithParam<Launcher> {};
INSTANTIATE_TEST_SUITE_P(Real, Mpirun,
                         ::testing::Values(Launcher{"open-mpi", "mpirun.openmpi --allow-run-as-root --oversubscribe"},
                                           Launcher{"mpich", "mpirun.mpich"}),
                         [](const auto& tested) { return std::string(tested.index == 0 ? "open_mpi" : "mpich"); });

TEST_P(Mpirun, gives_every_rank_its_place_and_every_job_its_id) {
  const Job two(GetParam().command, 2);
  const Job three(GetParam().command, 3);
  expect_complete(two, GetParam().name, 2);
  expect_complete(three, GetParam().name, 3);
  EXPECT_NE(two.settings.at(0).at("job_id"), three.settings.at(0).at("job_id"));
}

}  // namespace
}  // namespace lockstep::testing
