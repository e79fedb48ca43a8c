// SPDX-License-Identifier: Apache-2.0
// `lockstep compare`: plans, real comparisons that are stopped and continued, and what it refuses.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

#include "agent/meet/interfaces.h"
#include "tests/launch/child.h"
#include "tests/train/command.h"

namespace lockstep::testing {
namespace {

constexpr auto kLong = std::chrono::minutes(5);
const Words kCompare = {LOCKSTEP_COMMAND, "compare"};
const Words kTiny = {"--data", "synthetic", "--batch-size", "32"};

nlohmann::json comparison_in(const std::filesystem::path& folder) {
  return nlohmann::json::parse(read_file(folder / "comparison.json"));
}

nlohmann::json runs_in(const std::filesystem::path& folder) { return comparison_in(folder).at("runs"); }

int finished_in(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "comparison.json")) return 0;
  const auto runs = runs_in(folder);
  return static_cast<int>(std::ranges::count(runs, "finished", [](const auto& run) { return run["state"]; }));
}

Words names_in(const std::filesystem::path& folder) {
  Words names;
  if (std::filesystem::exists(folder))
    for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

// ---- plans

Words planned(const Words& options) {
  const Ended ended = run(kCompare + options + Words{"--list"});
  EXPECT_EQ(ended.exit_code, 0) << ended.error;
  Words names;
  for (const std::string& line : split(ended.output, '\n'))
    if (!line.empty() && line.front() != ' ' && !line.ends_with(" runs")) names.push_back(line);
  EXPECT_TRUE(contains(ended.output, concat("\n", names.size(), " runs\n")));
  return names;
}

bool has(const Words& names, const std::string& name) { return std::ranges::count(names, name) == 1; }

TEST(CompareCommand, lists_the_runs_of_every_experiment) {
  const Words strategies = planned({"strategies", "--devices", "4", "--seeds", "1"});
  EXPECT_EQ(strategies.size(), 9U);
  EXPECT_TRUE(has(strategies, "single-1-seed1") && has(strategies, "kvstore-dist_async-4-seed1"));
  EXPECT_EQ(planned({"--devices", "4", "--seeds", "1"}), strategies);

  const Words scaling = planned({"scaling", "--devices", "1,2,3", "--seeds", "1,2"});
  EXPECT_EQ(scaling.size(), 2U * (1 + 7 * 3 + 1));  // single on one device, a pipeline of two stages on two
  EXPECT_TRUE(has(scaling, "pipeline-2-2-seed2") && !has(scaling, "pipeline-2-3-seed2"));

  const Words hosts = planned({"server-vs-ring", "--links", "loopback", "--seeds", "1"});
  EXPECT_EQ(hosts.size(), 5U * 8);
  EXPECT_TRUE(has(hosts, "servers-4-8-seed1"));
  const Words slow = planned({"slow-links", "--links", "loopback", "--seeds", "1"});
  EXPECT_EQ(slow.size(), 7U);
  EXPECT_TRUE(has(slow, "ddp-bf16-4-seed1") && has(slow, "streaming-diloco-4-seed1"));

  EXPECT_TRUE(has(planned({"batch-and-rate", "--devices", "2"}), "ddp-2-batch_size=1024-lr_scaling=linear-seed3"));
  EXPECT_EQ(planned({"average-every", "--devices", "2", "--seeds", "1"}).size(), 8U);
  EXPECT_EQ(planned({"staleness", "--devices", "2", "--seeds", "1"}).size(), 8U);
  EXPECT_TRUE(has(planned({"bubble", "--seeds", "1"}), "pipeline-10-micro_batches=16-seed1"));
  EXPECT_EQ(planned({"kvstore-kinds", "--devices", "2", "--seeds", "1"}).size(), 16U);
}

TEST(CompareCommand, varies_what_it_is_told_to) {
  EXPECT_EQ(planned({"average-every", "--devices", "2", "--seeds", "7", "--vary", "average-every=3"}),
            (Words{"single-1-seed7", "averaging-2-average_every=3-seed7"}));
  EXPECT_EQ(planned({"--strategies", "single", "--seeds", "1", "--vary", "lr=0.1,0.2", "--vary", "model=mlp"}),
            (Words{"single-1-lr=0.1-model=mlp-seed1", "single-1-lr=0.2-model=mlp-seed1"}));
}

// ---- real comparisons

class Comparison : public ::testing::Test {
 protected:
  // Waits until so many runs have finished and the next is in the middle.
  void expect_in_the_middle(const Child& comparison, int finished) {
    const auto runs = folder_ / "out" / "runs";
    const auto has_begun = [&](const auto& name) { return steps_in(runs / name / "metrics.jsonl") > 1; };
    const auto in_the_middle = [&] {
      return finished_in(folder_ / "out") == finished && std::ssize(names_in(runs)) > finished &&
             std::ranges::all_of(names_in(runs), has_begun);
    };
    EXPECT_TRUE(wait_until([&] { return in_the_middle() || !is_running(comparison.pid()); }, kLong));
    EXPECT_TRUE(is_running(comparison.pid())) << comparison.error();
  }
  std::map<std::string, std::string> metrics_of_finished() const {
    std::map<std::string, std::string> metrics;
    for (const auto& run : runs_in(folder_ / "out"))
      if (run["state"] == "finished")
        metrics[run["name"]] = read_file(folder_ / "out" / run["folder"].get<std::string>() / "metrics.jsonl");
    return metrics;
  }
  Words command(const Words& options) const { return kCompare + options + kTiny + Words{"--output", folder_ / "out"}; }

  TempFolder folder_;
};

TEST_F(Comparison, goes_on_where_it_was_stopped) {
  const Words two = command({"--strategies", "single,ddp", "--devices", "2", "--seeds", "1,2", "--steps", "300"});
  std::map<std::string, std::string> finished;
  int count = 0;
  for (const int signal : {SIGINT, SIGKILL}) {
    Child stopped(two);
    expect_in_the_middle(stopped, ++count);
    stopped.signal(signal);
    EXPECT_EQ(stopped.wait(kLong), 128 + signal) << stopped.error();
    EXPECT_EQ(stopped.error().find("stopped after 1 of 4 runs; the same command goes on") != std::string::npos,
              signal == SIGINT);
    finished.merge(metrics_of_finished());
  }
  EXPECT_EQ(finished.size(), 2U);
  const Ended ended = run(two, kLong);
  ASSERT_EQ(ended.exit_code, 0) << ended.error;
  EXPECT_TRUE(contains(ended.error, "2 of 4 runs are in"));
  const auto all = metrics_of_finished();
  EXPECT_EQ(all.size(), 4U);
  for (const auto& [name, metrics] : finished) EXPECT_EQ(all.at(name), metrics) << name;
  EXPECT_TRUE(contains(ended.output, "| ddp-2 | 2 | ")) << ended.output;
  for (const auto& [name, metrics] : all) {  // each starts at step 0 once
    const std::string first = "\"epoch\":0,\"step\":0,";
    EXPECT_TRUE(contains(metrics, first)) << name;
    EXPECT_EQ(metrics.find(first), metrics.rfind(first)) << name;
    EXPECT_TRUE(contains(metrics, "{\"event\":\"run\"")) << name;
    EXPECT_EQ(name.starts_with("ddp"), metrics.find("exchanged_bytes") != std::string::npos) << name;
  }
  for (const auto& run : runs_in(folder_ / "out")) EXPECT_GT(run["peak_memory_bytes"], 1e6) << run;

  auto older = comparison_in(folder_ / "out");  // a run of which less is said than today is made again
  older["runs"][0].erase("varied");
  write_file(folder_ / "out" / "comparison.json", older.dump());
  EXPECT_TRUE(contains(run(two, kLong).error, "3 of 4 runs are in"));
  EXPECT_TRUE(runs_in(folder_ / "out")[0].contains("varied"));

  const auto before = read_file(folder_ / "out" / "comparison.json");
  const Ended other = run(two + Words{"--threads", "2"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_TRUE(contains(other.error, "holds another comparison: threads is 1 there and 2 here")) << other.error;
  EXPECT_EQ(read_file(folder_ / "out" / "comparison.json"), before);
}

// ---- every experiment with two steps: a few of its runs, and in `make soak` all of them

// The cells of a column of the tables, by the name of the row.
std::map<std::string, std::string> column_of(const std::string& tables, const std::string& head) {
  std::map<std::string, std::string> cells;
  size_t place = 0;
  for (const std::string& line : split(tables, '\n')) {
    const Words words = split(line, '|');
    const auto found = static_cast<size_t>(std::ranges::find(words, " " + head + " ") - words.begin());
    if (found < words.size())
      place = found;
    else if (line.starts_with("| ") && !line.starts_with("| ---") && place > 0)
      cells[words[1]] = words.at(place);
  }
  return cells;
}

struct Small {
  std::string experiment;
  Words few;
  std::string column;  // which answers its question
};

class SmallExperiment : public Comparison, public ::testing::WithParamInterface<Small> {};
INSTANTIATE_TEST_SUITE_P(
    All, SmallExperiment,
    ::testing::Values(
        Small{"scaling", {"--strategies", "single,towers", "--devices", "1,2"}, "speed-up"},
        Small{"batch-and-rate", {"--vary", "batch-size=8,16", "--vary", "lr-scaling=none,linear"}, "loss"},
        Small{"average-every", {"--vary", "average-every=2"}, "samples/s"},
        Small{"staleness", {"--strategies", "kvstore-dist_bounded", "--vary", "staleness=1"}, "max delay"},
        Small{"bubble",
              {"--model", "resnet18-32", "--devices", "10", "--vary", "micro-batches=2", "--batch-size", "10"},
              "formula %"},
        Small{"kvstore-kinds",
              {"--strategies", "kvstore-local_allreduce_cpu,kvstore-dist_async", "--vary", "model=lenet"},
              "MB/step"}),
    [](const auto& tested) {
      std::string name = tested.param.experiment;
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST_P(SmallExperiment, answers_its_question) {
  const auto& [experiment, few, column] = GetParam();
  const bool soak = std::getenv("LOCKSTEP_WHOLE_EXPERIMENTS") != nullptr;
  const Ended ended = run(
      kCompare + Words{experiment, "--seeds", "1", "--steps", "2", "--data", "synthetic", "--output", folder_ / "out"} +
          (soak ? Words{} : few),
      kLong);
  ASSERT_EQ(ended.exit_code, 0) << ended.error << ended.output;
  EXPECT_EQ(ended.output, read_file(folder_ / "out" / "tables.md"));
  const auto cells = column_of(ended.output, column);
  EXPECT_FALSE(cells.empty()) << ended.output;
  for (const auto& [name, cell] : cells)
    EXPECT_TRUE(name.starts_with(" single") || std::isdigit(cell[1])) << name << '\n' << ended.output;
}

// LeNet has no nine stages. `single` comes first.
TEST_F(Comparison, names_a_run_that_fails_and_makes_the_others) {
  const Ended ended =
      run(command({"--strategies", "single,pipeline", "--devices", "9", "--seeds", "1", "--steps", "2"}), kLong);
  EXPECT_EQ(ended.exit_code, 1) << ended.error;
  EXPECT_EQ(finished_in(folder_ / "out"), 1);
  EXPECT_TRUE(contains(ended.output, "failed: pipeline-9-seed1: it ended with exit code 2: UsageError: "))
      << ended.output;
}

TEST_F(Comparison, ends_a_run_at_its_deadline) {
  const Ended ended =
      run(command({"--strategies", "single", "--seeds", "1", "--epochs", "1000000", "--deadline", "2"}), kLong);
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.output, "failed: single-1-seed1: it did not end within 2 s (--deadline)")) << ended.output;
  EXPECT_EQ(runs_in(folder_ / "out")[0]["state"], "failed");
}

TEST_F(Comparison, has_ranks_as_hosts_on_the_loopback_device) {
  const Ended ended = run(command({"server-vs-ring", "--links", "loopback", "--strategies", "ddp,servers-2",
                                   "--devices", "2", "--seeds", "1", "--steps", "3"}),
                          kLong);
  if (address_for_others().empty()) {
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.error, "this machine has no network address")) << ended.error;
    return;
  }
  ASSERT_EQ(ended.exit_code, 0) << ended.error << ended.output;
  EXPECT_TRUE(contains(ended.error, "hosts on the loopback device"));
  EXPECT_TRUE(contains(ended.output, "| servers-2-2 | 1 | ")) << ended.output;
  EXPECT_EQ(comparison_in(folder_ / "out")["settings"]["links"], "loopback");
}

TEST_F(Comparison, has_two_ranks_on_each_of_two_hosts) {
  if (address_for_others().empty()) GTEST_SKIP() << "this machine has no network address";
  const Ended ended = run(command({"slow-links", "--links", "loopback", "--strategies", "ddp,ddp-bf16,streaming-diloco",
                                   "--vary", "average-every=4", "--model", "gpt-mini", "--seeds", "1", "--steps", "9"}),
                          kLong);
  ASSERT_EQ(ended.exit_code, 0) << ended.error << ended.output;
  const auto seconds = column_of(ended.output, "s to loss");
  EXPECT_EQ(seconds.size(), 3U) << ended.output;
  EXPECT_TRUE(std::isdigit(seconds.at(" ddp-4-average_every=4 ")[1])) << ended.output;
  for (const auto& [name, metrics] : metrics_of_finished()) {
    const auto last = nlohmann::json::parse(split(metrics, '\n').at(10));
    EXPECT_EQ(last.at("ranks"), 4) << name;
    EXPECT_EQ(last.value("averages", 0), name.starts_with("streaming") ? 9 : 0) << name;
  }
}

// ---- bad input

struct Refused {
  Words options;
  std::string message;
};

class CompareRefuses : public ::testing::TestWithParam<Refused> {};
INSTANTIATE_TEST_SUITE_P(
    Options, CompareRefuses,
    ::testing::Values(Refused{{"speed"}, "knows no experiment 'speed'"},
                      Refused{{"--strategies", "ddp,mpi"}, "knows no strategy 'mpi'"},
                      Refused{{"--seeds", "1,1"}, "-seed1 is asked for twice"}, Refused{{"--vary", "lr"}, "--vary lr"},
                      Refused{{"--vary", "lr=0.1,,0.2"}, "--vary lr=0.1,,0.2"},
                      Refused{{"batch-and-rate", "--batch-size", "32"}, "--batch-size, which batch-and-rate varies"},
                      Refused{{"--strategies", "servers-2"}, "servers as hosts"},
                      Refused{{"--strategies", "pipeline", "--devices", "1"}, "nothing to run"},
                      Refused{{"--", "--ranks", "2"}, "--ranks after --"},
                      Refused{{"--strategies", "single", "--", "--no-such-option", "3"}, "--no-such-option"}),
    [](const auto& tested) { return concat("case_", tested.index); });

TEST_P(CompareRefuses, what_makes_no_sense) {
  const TempFolder folder;
  const Ended ended = run(kCompare + Words{"--output", folder / "out"} + GetParam().options);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.error, GetParam().message));
}

TEST(CompareCommand, refuses_two_budgets) {
  EXPECT_NE(run(kCompare + Words{"--list", "--epochs", "1", "--steps", "3"}).exit_code, 0);
}

TEST(CompareCommand, leaves_a_folder_that_is_not_its_own_alone) {
  const TempFolder folder;
  const Words compare = kCompare + Words{"--strategies", "single", "--output", folder.path()};
  const auto refuses = [&](const std::string& file, const std::string& content, const std::string& message) {
    write_file(folder / file, content);
    const Ended ended = run(compare);
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.error, message)) << ended.error;
    EXPECT_EQ(read_file(folder / file), content);
  };
  refuses("notes.txt", "mine", "holds other files, and no comparison");
  refuses("comparison.json", "{\"lockstep_comparison\": 1, \"sett",
          "is not a comparison that this lockstep can continue");
  refuses("comparison.json", "{\"lockstep_comparison\": 2}", "is not a comparison that this lockstep can continue");
  EXPECT_EQ(names_in(folder.path()), (Words{"comparison.json", "notes.txt"}));
}

}  // namespace
}  // namespace lockstep::testing
