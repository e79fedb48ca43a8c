// SPDX-License-Identifier: Apache-2.0
#include "cli/top/layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/top/json.h"
#include "tests/support.h"

namespace lockstep::top {
namespace {

using lockstep::testing::contains;

JobView some_job() {
  JobView job{
      .job = {.number = 4711,
              .name = "lockstep train",
              .command = "lockstep train --strategy ddp --ranks 2 --model lenet --data fashion-mnist --batch-size 256",
              .world_size = 2},
      .seconds = 3700,
      .samples_per_second = 12345};
  for (int rank = 0; rank < 2; ++rank)
    job.ranks.push_back({.now = {.pid = 1234567 + rank,
                                 .rank = rank,
                                 .phase = Phase::kValidating,
                                 .step = 12345678,
                                 .samples = 5,
                                 .loss = 0.25,
                                 .state = 'S',
                                 .resident_bytes = std::int64_t{1023} << 20},
                         .samples_per_second = 12345,
                         .shares = {.compute = 1, .wait = 0.2}});
  job.verdicts = {
      {"data", {1}, "rank 1 waits for data: 38 % of its time, and the others wait for it 40 % of theirs; --workers 2"}};
  return job;
}

std::string heading_of(int width) {
  const std::vector<Line> lines = lines_of(some_job(), width);
  return std::ranges::find(lines, Style::kHeading, &Line::style)->text;
}

TEST(Layout, never_is_wider_than_the_terminal) {
  JobView job = some_job();
  job.ranks[0].server =
      ServerView{.clients = 1, .queue = 0.5, .requests = 100, .ms = 3, .mean_delay = 1, .most_delay = 7};
  for (int width = 1; width <= 200; ++width) {
    for (const Line& line : lines_of(job, width)) EXPECT_LE(std::ssize(line.text), width) << line.text;
    EXPECT_LE(std::ssize(one_line_of(job, width)), width);
  }
}

TEST(Layout, leaves_out_columns_in_a_fixed_order) {
  EXPECT_EQ(heading_of(200),
            "rank     step samples/s comp wait exch data  upd     memory    age phase        for      pid       loss");
  EXPECT_EQ(heading_of(80), "rank     step samples/s comp wait exch data  upd     memory    age phase");
  EXPECT_EQ(heading_of(40), "rank     step comp wait data  upd    age");
  std::string wider = heading_of(kWidthOfAllColumns);
  for (int width = kWidthOfAllColumns; width >= 4; --width) {
    const std::string here = heading_of(width);
    for (std::size_t at = 0; at < here.size(); at = here.find_first_not_of(' ', here.find(' ', at)))
      EXPECT_TRUE(contains(wider, here.substr(at, here.find(' ', at) - at))) << width;
    wider = here;
  }
  EXPECT_EQ(heading_of(5), "rank");
}

TEST(Layout, keeps_the_whole_verdict_in_a_narrow_terminal) {
  std::string said;
  for (const Line& line : lines_of(some_job(), 40))
    if (line.style == Style::kWarning) said += (said.empty() ? "" : " ") + line.text;
  EXPECT_EQ(said, "> " + some_job().verdicts[0].text);
}

TEST(Layout, shows_what_a_rank_does) {
  const std::vector<Line> lines = lines_of(some_job(), 200);
  EXPECT_EQ(lines[1].text, "job 4711, up 1:01:40, 2 ranks, 12,345 samples/s");
  EXPECT_EQ(lines.back().text,
            "   1 12345678    12,345 100%  20%   0%   0%   0% 1023.0 MiB   0 ms validating     -  1234568     0.2500");
  EXPECT_EQ(one_line_of(some_job(), 30), "job 4711, lockstep train");
}

TEST(Json, has_the_fields_that_are_documented) {
  const auto object = nlohmann::json::parse(json_of(std::vector<JobView>{some_job()}));
  EXPECT_EQ(object.at("format"), 1);
  const auto& job = object.at("jobs").at(0);
  EXPECT_EQ(job.at("job"), 4711);
  EXPECT_EQ(job.at("verdicts").at(0).at("ranks"), std::vector{1});
  const auto& rank = job.at("ranks").at(1);
  EXPECT_EQ(rank.at("state"), "running");
  EXPECT_EQ(rank.at("phase"), "validating");
  EXPECT_EQ(rank.at("shares").at("wait"), 0.2);
  EXPECT_EQ(rank.at("waits_for"), nullptr);
  EXPECT_FALSE(rank.contains("server"));
}

}  // namespace
}  // namespace lockstep::top
