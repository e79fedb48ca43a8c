// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/log.h"

#include <cstdlib>
#include <memory>

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace lockstep {
namespace {

std::shared_ptr<spdlog::logger> make_logger() {
  auto logger = std::make_shared<spdlog::logger>("lockstep", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("lockstep: %^%l%$: %v");
  const char* told = std::getenv("LOCKSTEP_LOG");
  const std::string name = told != nullptr ? told : "info";
  const auto level = spdlog::level::from_str(name);  // off for a name that it does not know
  logger->set_level(level == spdlog::level::off && name != "off" ? spdlog::level::info : level);
  return logger;
}

spdlog::logger& logger() {
  static const auto& instance = *new std::shared_ptr<spdlog::logger>(make_logger());  // objects in globals log at exit
  return *instance;
}

}  // namespace

void set_log_rank(int rank, int world_size) {
  logger().set_pattern(world_size == 1 ? "lockstep: %^%l%$: %v"
                                       : fmt::format("lockstep: rank {} of {}: %^%l%$: %v", rank, world_size));
}

void log_debug(const std::string& line) { logger().debug(line); }
void log_info(const std::string& line) { logger().info(line); }
void log_warning(const std::string& line) { logger().warn(line); }

}  // namespace lockstep
