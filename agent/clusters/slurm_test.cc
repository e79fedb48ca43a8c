// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/slurm.h"

#include <gtest/gtest.h>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Nodes = std::vector<std::string>;

TEST(Slurm, spells_out_a_list_of_nodes) {
  EXPECT_EQ(nodes_in("n1"), Nodes({"n1"}));
  EXPECT_EQ(nodes_in("n1,n2"), Nodes({"n1", "n2"}));
  EXPECT_EQ(nodes_in("node[08-10,007],login"), Nodes({"node08", "node09", "node10", "node007", "login"}));
  EXPECT_EQ(nodes_in("gpu-[3]"), Nodes({"gpu-3"}));
  EXPECT_EQ(nodes_in("rack[2-3]n[5-6]-ib,x"), Nodes({"rack2n5-ib", "rack2n6-ib", "rack3n5-ib", "rack3n6-ib", "x"}));
  EXPECT_EQ(nodes_in("a.example.org,b[1-2]"), Nodes({"a.example.org", "b1", "b2"}));
}

TEST(Slurm, a_list_that_is_not_one_has_no_nodes) {
  for (const char* list :
       {"", ",", "n1,", "n[", "n[1-2", "n[]", "n[-2]", "n[2-1]", "n[1-x]", "n[0-2000000000]", "n]1", "[,]", "n[1[2]]"})
    EXPECT_TRUE(nodes_in(list).empty()) << list;
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
