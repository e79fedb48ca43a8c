// SPDX-License-Identifier: Apache-2.0
// A loop that averages gradients by hand over MPI, and what changes in it with lockstep. Built with BY_HAND defined it is the
// loop as it was. Both print the same losses. docs/coming-from.md has the lines that differ.
#include <iomanip>
#include <iostream>

#include <mpi.h>
#include <torch/torch.h>

#ifndef BY_HAND
#include <lockstep/lockstep.h>
#include <lockstep/mpi.h>
#endif

// 40 images of 28 x 28, whose classes a fixed matrix decides.
struct Images {
  Images() : data(torch::randn({40, 1, 28, 28})), target(data.flatten(1).mm(torch::randn({784, 10})).argmax(1)) {}
  torch::Tensor data, target;
};

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  {
    torch::manual_seed(1);
    const Images images;
    torch::nn::Sequential net(torch::nn::Conv2d(1, 8, 5), torch::nn::ReLU(), torch::nn::MaxPool2d(4),
                              torch::nn::Flatten(), torch::nn::Linear(288, 10));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
#ifndef BY_HAND
    const auto world = lockstep::from_mpi(MPI_COMM_WORLD);
    lockstep::DistributedDataParallel ddp(world, *net, optimizer);
#endif
    for (int step = 0; step < 20; ++step) {
      const auto mine = torch::arange(rank, images.target.size(0), size);  // every size-th image
      const auto loss = torch::cross_entropy_loss(net->forward(images.data.index({mine})), images.target.index({mine}));
#ifdef BY_HAND
      loss.backward();
      for (auto& parameter : net->parameters()) {
        MPI_Allreduce(MPI_IN_PLACE, parameter.grad().data_ptr(), static_cast<int>(parameter.numel()), MPI_FLOAT,
                      MPI_SUM, MPI_COMM_WORLD);
        parameter.grad().div_(size);
      }
#else
      ddp.backward(loss, mine.numel());
#endif
      optimizer.step();
      optimizer.zero_grad();
    }
    const torch::NoGradGuard no_grad;
    if (rank == 0)
      std::cout << std::setprecision(3) << "loss "
                << torch::cross_entropy_loss(net->forward(images.data), images.target).item<float>() << std::endl;
  }
  MPI_Finalize();
}
