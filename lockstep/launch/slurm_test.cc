// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/slurm.h"

#include <gtest/gtest.h>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

TEST(Slurm, finds_the_first_node_of_a_list) {
  EXPECT_EQ(first_node("n1"), "n1");
  EXPECT_EQ(first_node("n1,n2"), "n1");
  EXPECT_EQ(first_node("node[01-04,07]"), "node01");
  EXPECT_EQ(first_node("node[07,09],login"), "node07");
  EXPECT_EQ(first_node("gpu-[3]"), "gpu-3");
  EXPECT_EQ(first_node("rack[2-3]n[05-09]-ib,x"), "rack2n05-ib");
  EXPECT_EQ(first_node("a.example.org,b[1-2]"), "a.example.org");
}

TEST(Slurm, a_list_that_is_not_one_has_no_first_node) {
  for (const char* list : {"", ",", "n[", "n[1-2", "n[]", "n[-2]", "n]1", "[,]"}) EXPECT_FALSE(first_node(list)) << list;
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
