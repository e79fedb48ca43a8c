// bench/hosts/link_options.h: the options of a network's links, the same in every benchmark that has one.
#pragma once

#include <CLI/CLI.hpp>

#include "bench/hosts/network.h"

namespace lockstep::bench {

inline void add_link_options(CLI::App& app, LinkOptions& link) {
  app.add_option("--rate", link.megabits_per_second, "of every link, Mb/s in each direction")->capture_default_str();
  app.add_option("--congestion-control", link.congestion_control,
                 "of TCP: bbr, cubic, reno; this machine's by default");
}

}  // namespace lockstep::bench
