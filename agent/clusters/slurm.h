// SPDX-License-Identifier: Apache-2.0
// agent/clusters/slurm.h: what Slurm's variables say about the nodes of a step.
//
// Flow:    agent/clusters/environment.h -> here
// Threads: any
// Ranks:   every rank of a step computes the same
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace lockstep {

// "2(x3),1" -> the ranks of node 0, 1, 2 are 2 each, of node 3 it is 1; nothing if the text is not of that form.
std::optional<int> tasks_of_node(const std::string& text, int node);

// The first and the last node of a list in Slurm's short form: "gpu[01-02,07],login" -> gpu01, login;
// "rack[2-3]n[5-6]" -> rack2n5, rack3n6. Nothing if the text is not of that form.
std::optional<std::pair<std::string, std::string>> ends_of(const std::string& list);

// The ports at which the ranks of a step may meet: kStepPorts from this one on. Steps that run at the same time mostly
// have different ones. Below the ports that Linux gives to outgoing connections.
inline constexpr int kStepPorts = 16;
int first_port_of_step(const std::string& job_id);

}  // namespace lockstep
