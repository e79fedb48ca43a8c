// lockstep-verify: `lockstep verify`: trains one of lockstep's models on one rank and on several, and compares.
#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/guarded.h"
#include "lockstep/models.h"
#include "lockstep/verify.h"

namespace {

int verify(int argc, char** argv) {
  lockstep::VerifyOptions options{.strategy = {.sgd = {.lr = 0.05, .momentum = 0.9}, .seed = 1}};
  std::string model = "lenet";
  CLI::App app("Trains a model for a few steps on one rank and on several, and reports whether the same comes out.",
               "lockstep verify");
  app.add_option("--model", model, "which model")->check(CLI::IsMember(lockstep::model_names()))->capture_default_str();
  app.add_option("--ranks", options.ranks, "ranks, as threads of one process")
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "steps")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "global batch")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--optimizer", options.strategy.optimizer, "update rule")
      ->check(CLI::IsMember({"sgd", "adam", "adamw", "lamb", "lars"}))
      ->capture_default_str();
  app.add_option("--virtual-shards", options.strategy.virtual_shards, "expect the same bits; 0: off")
      ->capture_default_str();
  app.add_option("--tolerance", options.tolerance, "of each parameter's norm, in float64")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : lockstep::kUsage;
  }
  const lockstep::VerifyReport report = lockstep::verify(lockstep::model_task(model), options);
  const bool good = options.strategy.virtual_shards > 0 ? report.same_bits : report.equal;
  std::cout << model << " on 1 and on " << options.ranks << " ranks, " << options.steps
            << " steps: " << report.describe() << '\n';
  return good ? 0 : lockstep::kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::guarded([&] { return verify(argc, argv); });
}
