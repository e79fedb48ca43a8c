// SPDX-License-Identifier: Apache-2.0
// A training loop of a user's own with lockstep::Recovery, whose ranks kill themselves where KILL says:
//
//   KILL       GENERATION:RANK:STEP:PLACE, several with commas. PLACE: forward, update, keep, between (before the next batch), epoch (after
//              the last step of an epoch), begin (before the World, STEP 0), made (before Recovery, STEP 0), timer (AFTER microseconds
//              after the beginning of the step, wherever that is)
//   OPTIMIZER  sgd, adamw, torch_adam, scaled (sgd with a GradientScaler that doubles its scale every third step)
//   IDS        a folder: each rank writes which samples its steps were of
//   FORGETS    epoch: begins with epoch 0 again after a loss; scaler: does not give it to Recovery
//
// Rank 0 prints a hash of all parameters and buffers, what it has counted, and the scale of the loss.
#include <signal.h>
#include <sys/time.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kSamples = 203;
constexpr int64_t kEpochs = 2;

std::string told(const char* name, const std::string& otherwise = "") {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

// By SIGALRM.
void die_after(int microseconds) {
  const itimerval timer{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = microseconds}};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

void die_at(const std::string& place, int64_t step) {
  std::ostringstream here;
  here << told("TORCHELASTIC_RESTART_COUNT", "0") << ':' << told("RANK") << ':' << step << ':' << place;
  std::istringstream all(told("KILL"));
  for (std::string each; std::getline(all, each, ',');)
    if (each == here.str())
      place == "timer" ? die_after(std::atoi(told("AFTER", "1").c_str())) : void(::raise(SIGKILL));
}

// Sample i has target i.
lockstep::Loader make_loader(const lockstep::World& world) {
  const torch::Tensor ids = torch::arange(kSamples);
  const torch::Tensor data = torch::sin(ids.unsqueeze(1).to(torch::kFloat32) * torch::arange(1, 9));
  return lockstep::make_loader(world, lockstep::TensorDataset("numbers", data, ids), {.batch_size = 16, .seed = 3});
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<torch::Tensor>& parameters) {
  if (told("OPTIMIZER") == "adamw")
    return std::make_unique<lockstep::AdamW>(parameters, lockstep::AdamWOptions{.lr = 0.01});
  if (told("OPTIMIZER") == "torch_adam")
    return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
  return std::make_unique<lockstep::SGD>(parameters, lockstep::SGDOptions{.lr = 0.1, .momentum = 0.9});
}

uint64_t hash_of(const torch::nn::Module& net) {
  uint64_t hash = 1469598103934665603U;
  const auto add = [&](const torch::Tensor& tensor) {
    const auto* const bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  };
  for (const torch::Tensor& tensor : net.parameters()) add(tensor);
  for (const torch::Tensor& tensor : net.buffers()) add(tensor);
  return hash;
}

int train() {
  die_at("begin", 0);
  auto world = lockstep::World::from_env();
  torch::manual_seed(1 + static_cast<uint64_t>(world.rank()));
  torch::nn::Sequential net(torch::nn::Linear(8, 32), torch::nn::BatchNorm1d(32), torch::nn::ReLU(),
                            torch::nn::Dropout(0.3), torch::nn::Linear(32, 1));
  const auto optimizer = make_optimizer(net->parameters());
  lockstep::DistributedDataParallel ddp(world, *net, *optimizer);
  auto loader = make_loader(world);
  die_at("made", 0);
  lockstep::Recovery recovery(ddp, *optimizer, loader, {.share_of_time = 1});
  double sum_of_losses = 0;
  recovery.keep("sum of losses", sum_of_losses);
  const bool scales = told("OPTIMIZER") == "scaled";
  lockstep::GradientScaler scaler({.initial_scale = 4, .growth_interval = 3});
  if (scales && told("FORGETS") != "scaler") recovery.keep("scaler", scaler);
  const bool forgets_epoch = told("FORGETS") == "epoch";
  std::ofstream ids;
  if (!told("IDS").empty()) ids.open(told("IDS") + "/" + std::to_string(::getpid()), std::ios::app);
  for (auto epoch = forgets_epoch ? 0 : recovery.epoch(); epoch < kEpochs; ++epoch) {
    for (auto& batch : forgets_epoch ? loader.epoch(epoch) : recovery.batches(epoch)) {
      die_at("timer", recovery.steps());
      die_at("forward", recovery.steps());
      lockstep::set_learning_rate(*optimizer, 0.1 / static_cast<double>(1 + recovery.steps()));
      auto loss = torch::mse_loss(net->forward(batch.data), batch.data.sum(1, true));
      ddp.backward(scales ? scaler.scale(loss) : loss, batch.size());
      die_at("update", recovery.steps());
      if (scales)
        scaler.step(dynamic_cast<lockstep::Optimizer&>(*optimizer));
      else
        optimizer->step();
      optimizer->zero_grad();
      sum_of_losses += ddp.last_batch().mean_loss;
      ids << told("TORCHELASTIC_RESTART_COUNT", "0") << ' ' << epoch << ' ' << recovery.steps();
      for (int64_t i = 0; i < batch.size(); ++i) ids << ' ' << batch.target[i].item<int64_t>();
      ids << std::endl;
      die_at("keep", recovery.steps());
      recovery.step();
      die_at("between", recovery.steps());
    }
    die_at("epoch", recovery.steps());
  }
  if (world.rank() == 0)
    std::cout << "trained " << recovery.steps() << " steps, " << std::hex << hash_of(*net) << ", " << std::hexfloat
              << sum_of_losses << ", " << scaler.current_scale() << std::endl;
  return 0;
}

}  // namespace

int main() try { return lockstep::recover(train); } catch (const lockstep::Error& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
