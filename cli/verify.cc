// SPDX-License-Identifier: Apache-2.0
// lockstep-verify: `lockstep verify`: trains one of lockstep's models on one rank and on several, and compares.
#include <CLI/CLI.hpp>
#include <iostream>

#include "lockstep/base/command_line.h"
#include "lockstep/models.h"
#include "lockstep/train/end_process.h"
#include "lockstep/verify.h"

namespace lockstep {
namespace {

void add_options(CLI::App& app, std::string& model, VerifyOptions& options) {
  app.add_option("--model", model, "which model")->check(CLI::IsMember(model_names()));
  app.add_option("--ranks", options.ranks, "ranks, as threads of one process")->check(CLI::Range(2, 64));
  app.add_option("--steps", options.steps, "steps")->check(CLI::Range(1, 100000));
  app.add_option("--batch-size", options.batch_size, "global batch")->check(CLI::Range(1, 1000000));
  OptimizerOptions& optimizer = options.strategy.optimizer;
  const auto choose = [&optimizer](const std::string& name) {
    if (name != name_of(optimizer)) optimizer = optimizer_options(name);
  };
  app.add_option_function<std::string>("--optimizer", choose, "update rule")
      ->check(CLI::IsMember(optimizer_names()))
      ->default_str(name_of(optimizer));
  app.add_option("--virtual-shards", options.strategy.ddp.virtual_shards,
                 "so many shards, and expect the same bits; 0: off");
  app.add_option("--tolerance", options.tolerance, "of each parameter's norm, in float64");
}

int verify_model(const std::string& model, const VerifyOptions& options) {
  const VerifyReport report = verify(model_task(model), options);
  std::cout << model << " on 1 and on " << options.ranks << " ranks, " << options.steps
            << " steps: " << report.describe() << '\n';
  const bool good = options.strategy.ddp.virtual_shards > 0 ? report.same_bits : report.equal;
  return good ? 0 : kFailed;
}

int run_verify(int argc, char** argv) {
  VerifyOptions options{.strategy = {.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9}, .seed = 1}};
  std::string model = "lenet";
  CLI::App app("Trains a model for a few steps on one rank and on several, and compares the results.",
               "lockstep verify");
  app.option_defaults()->always_capture_default();
  add_options(app, model, options);
  return parse_and_run(app, argc, argv, [&] { return verify_model(model, options); });
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::end_process_with(lockstep::run_verify(argc, argv)); }
