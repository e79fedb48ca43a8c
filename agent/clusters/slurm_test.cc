// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/slurm.h"

#include <gtest/gtest.h>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Ends = std::pair<std::string, std::string>;

TEST(Slurm, finds_both_ends_of_a_list_of_nodes) {
  EXPECT_EQ(ends_of("n1"), Ends("n1", "n1"));
  EXPECT_EQ(ends_of("n1,n2"), Ends("n1", "n2"));
  EXPECT_EQ(ends_of("node[08-10,007],login"), Ends("node08", "login"));
  EXPECT_EQ(ends_of("node[08-10,007]"), Ends("node08", "node007"));
  EXPECT_EQ(ends_of("gpu-[3]"), Ends("gpu-3", "gpu-3"));
  EXPECT_EQ(ends_of("x,rack[2-3]n[5-6]-ib"), Ends("x", "rack3n6-ib"));
  EXPECT_EQ(ends_of("rack[2-3]n[5,12]-ib,y,z"), Ends("rack2n5-ib", "z"));
  EXPECT_EQ(ends_of("a.example.org,b[1-2]"), Ends("a.example.org", "b2"));
}

TEST(Slurm, a_list_that_is_not_one_has_no_ends) {
  for (const char* list : {"", ",", "n1,", "n[", "n[1-2", "n[]", "n[-2]", "n[1-x]", "n]1", "[,]", "n[1[2]]"})
    EXPECT_FALSE(ends_of(list)) << list;
}

TEST(Slurm, steps_have_ports_of_their_own) {
  EXPECT_EQ(first_port_of_step("77-0"), first_port_of_step("77-0"));
  EXPECT_NE(first_port_of_step("77-0"), first_port_of_step("77-1"));
  EXPECT_NE(first_port_of_step("77-0"), first_port_of_step("78-0"));
  for (int job = 0; job < 1000; ++job) {
    const int port = first_port_of_step(concat(job, "-0"));
    EXPECT_GE(port, 1024);
    EXPECT_LE(port + kStepPorts, 32768) << "Linux gives these to outgoing connections";
  }
}

}  // namespace
}  // namespace lockstep
