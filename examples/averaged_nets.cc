// SPDX-License-Identifier: Apache-2.0
// 1 + N threads: one thread prepares data, each of N threads trains a network of its own on its device, and after every
// batch the parameters of all networks are averaged on network 0 and copied back. A stop from anywhere ends all of them.
// docs/five-systems.md has a picture.
#include <iostream>
#include <stdexcept>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/types.h>

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

constexpr int kDevices = 3;

// A batch of 60 samples, prepared on the scheduling thread.
lockstep::Batch prepare(const torch::Tensor& truth) {
  const auto inputs = torch::randn({60, 10});
  return {inputs, inputs.matmul(truth)};
}

// A step of plain SGD. Returns the loss before it.
double train(lockstep::MLP net, const lockstep::Batch& batch) {
  const auto loss = torch::mse_loss(net->forward(batch.data), batch.target);
  net->zero_grad();
  loss.backward();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter -= 0.2 * parameter.grad();
  return loss.item<double>();
}

}  // namespace

int main() try {
  lockstep::Devices devices({.count = kDevices});
  std::vector<lockstep::MLP> nets;
  std::vector<lockstep::ModulePtr> modules;
  for (int i = 0; i < kDevices; ++i) {
    nets.emplace_back(lockstep::MLPOptions{.inputs = 10, .hidden = {}, .outputs = 2});
    modules.push_back(nets.back().ptr());
  }
  const auto blocks = lockstep::flat_blocks(modules);  // one copy moves all weights of a network
  lockstep::average(devices, blocks);                  // begin alike

  torch::manual_seed(1);
  const auto truth = torch::randn({10, 2});
  lockstep::MLP alone(lockstep::MLPOptions{.inputs = 10, .hidden = {}, .outputs = 2});  // to compare with
  const auto block = lockstep::flat_blocks({alone.ptr()})[0];
  block.copy_(blocks[0]);
  std::string stopped;
  int batches = 0;
  try {
    while (true) {  // until somebody stops it
      const auto batch = prepare(truth);
      const auto shards = lockstep::split_and_load(batch, devices);
      devices.run([nets, shards](lockstep::Device& device) {  // on every device at the same time, without a lock
        auto net = nets[static_cast<size_t>(device.index())];
        const auto& shard = shards[static_cast<size_t>(device.index())];
        if (train(net, shard) < 1e-4) lockstep::stop("the loss is small enough");  // here from a device's thread
      });
      lockstep::average(devices, blocks);  // returns when every network has its copy: none trains on before
      ++batches;
      for (const auto& each : blocks) require(torch::equal(each, blocks[0]), "networks differ after an average");
      train(alone, batch);
      require(torch::allclose(blocks[0], block, 1e-3, 1e-4), "three networks learn something else than one");
    }
  } catch (const lockstep::PeerLost& error) {
    stopped = error.text().what;
  }
  std::cout << batches << " batches, then " << stopped << std::endl;
  require(stopped.find("the loss is small enough") != std::string::npos, "something else than stop() ended it");
  require((nets[0]->parameters()[0].t() - truth).abs().max().item<double>() < 0.1, "the networks did not learn");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
