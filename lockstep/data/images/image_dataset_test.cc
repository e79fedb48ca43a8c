// SPDX-License-Identifier: Apache-2.0
#include "lockstep/images.h"

#include <torch/nn/functional/upsampling.h>

#include <cmath>
#include <random>

#include "lockstep/base/to_size.h"
#include "lockstep/data/images/image_kernels.h"
#include "lockstep/data/images/image_transforms.h"
#include "lockstep/loader.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::first_indices;
using testing::message_of;

std::shared_ptr<const ImageSource> random_images(int64_t count, const ImageShape& shape, int classes = 10) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(4));
  const auto images = torch::randint(256, {count, shape.channels, shape.height, shape.width}, generator, torch::kUInt8);
  return std::make_shared<MemoryImages>("random", images, torch::arange(count).remainder(classes), classes, "memory");
}

const torch::Tensor& pixels_of(const ImageDataset& data) {
  return dynamic_cast<const MemoryImages&>(data.source()).images();
}

TEST(ImageDataset, normalises_each_channel) {
  const ImageDataset data(random_images(5, {3, 7, 9}), {.mean = {0.1F, 0.2F, 0.3F}, .deviation = {0.5F, 0.6F, 0.7F}});
  const auto mean = torch::tensor({0.1F, 0.2F, 0.3F}).reshape({3, 1, 1});
  const auto deviation = torch::tensor({0.5F, 0.6F, 0.7F}).reshape({3, 1, 1});
  const auto expected = (pixels_of(data).to(torch::kFloat32) / 255 - mean) / deviation;
  EXPECT_TRUE(torch::allclose(data.make_batch(first_indices(5)).data, expected, 1e-6, 1e-6));
}

TEST(ImageDataset, crops_with_zeros_around_and_flips) {
  const ImageDataset data(random_images(1, {3, 8, 8}),
                          {.mean = {0.5F}, .crop = Crop::kRandom, .padding = 3, .flip = true});
  const auto padded = torch::constant_pad_nd(pixels_of(data)[0].to(torch::kFloat32) / 255, {3, 3, 3, 3}) - 0.5;
  std::set<std::tuple<int, int, bool>> seen;
  for (int64_t epoch = 0; epoch < 300; ++epoch) {
    const torch::Tensor crop = data.assemble({.indices = first_indices(1), .epoch = epoch}).data[0];
    int matches = 0;
    for (int y = 0; y < 7; ++y)
      for (int x = 0; x < 7; ++x)
        for (const bool flip : {false, true}) {
          const auto part = padded.slice(1, y, y + 8).slice(2, x, x + 8);
          if (!torch::allclose(flip ? part.flip(2) : part, crop, 1e-5, 1e-6)) continue;
          ++matches;
          seen.insert({y, x, flip});
        }
    ASSERT_EQ(matches, 1) << "epoch " << epoch;
  }
  EXPECT_GT(seen.size(), 85U);  // of 98, in 300 draws
}

TEST(ImageDataset, resizes_as_torch_does_with_antialiasing) {
  std::mt19937 random(5);
  const auto size = [&] { return static_cast<int64_t>(3 + random() % 40); };
  for (int round = 50; round > 0; --round) {
    const ImageShape shape{round % 2 == 0 ? 3 : 1, size(), size()};
    const ImageDataset data(random_images(1, shape), {.height = size(), .width = size()});
    const ImageTransforms& t = data.transforms();
    const auto expected = at::_upsample_bilinear2d_aa(pixels_of(data).to(torch::kFloat32) / 255, {t.height, t.width},
                                                      /*align_corners=*/false);
    ASSERT_TRUE(torch::allclose(data.make_batch(first_indices(1)).data, expected, 1e-4, 1e-4))
        << shape.height << t.height;
  }
}

TEST(ImageKernels, resize_interleaved_pixels_like_planar_ones) {
  const auto planar_pixels = torch::randint(256, {3, 20, 30}, torch::kUInt8);
  const auto rgb = planar_pixels.permute({1, 2, 0}).contiguous();
  const Placement placement{.box = {3.5, 2.25, 20.5, 11.75}, .height = 9, .width = 13, .flip = true};
  const ImageShape shape{3, 20, 30};
  std::vector<float> a(3 * 9 * 13);
  std::vector<float> b(a.size());
  resize_image(planar(planar_pixels.data_ptr<uint8_t>(), shape), placement, {}, a.data());
  resize_image(interleaved(rgb.data_ptr<uint8_t>(), shape), placement, {}, b.data());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-3);
}

TEST(ImageDataset, draws_crops_with_the_requested_areas_and_aspect_ratios) {
  const ImageTransforms t{.height = 8, .width = 8, .crop = Crop::kRandomResized, .least_area = 0.2};
  double area = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    SampleRandom random(1, i);
    const Placement placement = draw_placement(t, {3, 300, 400}, random);
    const double share = placement.box.width * placement.box.height / (300 * 400);
    ASSERT_GE(share, 0.19);
    ASSERT_GE(placement.box.left, 0);
    ASSERT_LE(placement.box.left + placement.box.width, 400);
    ASSERT_LE(placement.box.width / placement.box.height, 1.35);
    area += share / 2000;
  }
  EXPECT_NEAR(area, 0.494, 0.02);  // large areas fit with few aspect ratios
}

TEST(ImageKernels, change_colours_as_defined) {
  const auto image = torch::rand({3, 5, 6});
  const auto changed = [&](const ColourChange& change) {
    torch::Tensor copy = image.clone();
    change_colours(copy.data_ptr<float>(), {3, 5, 6}, change);
    return copy;
  };
  const auto grey = 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2];
  EXPECT_TRUE(torch::allclose(changed({.brightness = 1.5F}), (image * 1.5).clamp(0, 1), 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(changed({.contrast = 0.3F}), image * 0.3 + grey.mean() * 0.7, 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(changed({.saturation = 0.25F}), image * 0.25 + grey * 0.75, 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(changed({.hue = 1.0F / 3}), torch::stack({image[2], image[0], image[1]}), 1e-3, 1e-4));
}

TEST(ImageDataset, mixes_two_samples_and_their_targets) {
  // Image i has the value i everywhere, and is of class i.
  const auto images = torch::arange(10, torch::kUInt8).reshape({10, 1, 1, 1}).expand({10, 1, 4, 4}).contiguous();
  const auto source = std::make_shared<MemoryImages>("steps", images, torch::arange(10), 10, "memory");
  const ImageDataset data(source, {.deviation = {1.0F / 255}, .mixup = 0.4});
  const Batch batch = data.assemble({.indices = first_indices(10), .seed = 3});
  EXPECT_TRUE(torch::allclose(batch.target.sum(1), torch::ones(10)));
  EXPECT_TRUE(
      torch::allclose(batch.target.matmul(torch::arange(10, torch::kFloat32)), batch.data.mean({1, 2, 3}), 1e-4, 1e-4));
  EXPECT_GT(batch.target.gt(0).sum().item<int>(), 10);
}

TEST(ImageDataset, gives_one_hot_targets) {
  const ImageDataset data(random_images(4, {1, 2, 2}, 3), {.one_hot = true});
  EXPECT_TRUE(torch::equal(data.make_batch(first_indices(4)).target,
                           torch::one_hot(torch::tensor({0, 1, 2, 0}), 3).to(torch::kFloat32)));
}

ImageTransforms every_augmentation() {
  return parse_transforms("random-resized-crop:12,flip,jitter:0.4:0.4:0.4:0.1,mixup:0.3", {});
}

TEST(ImageDataset, augments_a_sample_the_same_for_any_ranks_and_workers) {
  const auto source = random_images(40, {3, 20, 24});
  std::vector<torch::Tensor> alone(40);
  const auto collect = [&](int ranks, int workers, bool record) {
    run_ranks(ranks, [&](World& world) {
      const auto dataset = std::make_shared<ImageDataset>(source, every_augmentation());
      const auto order = sequential_order(40);
      Loader loader(world, dataset, {.batch_size = 8, .seed = 6, .workers = workers, .order = order});
      DistributedSampler sampler({.batch_size = 8, .rank = world.rank(), .ranks = world.size(), .order = order});
      int64_t step = 0;
      for (const Batch& batch : loader.epoch(3)) {
        const auto indices = sampler.part(step++);
        for (size_t i = 0; i < indices.size(); ++i) {
          const torch::Tensor sample = batch.data[static_cast<int64_t>(i)];
          torch::Tensor& expected = alone[to_size(indices[i])];
          if (record)
            expected = sample.clone();
          else
            EXPECT_TRUE(torch::equal(sample, expected)) << ranks << " ranks, sample " << indices[i];
        }
      }
    });
  };
  collect(1, 0, true);
  for (const int ranks : {1, 2, 3, 4, 7}) collect(ranks, ranks % 3, false);
}

TEST(ImageDataset, augments_differently_for_each_epoch_and_seed) {
  const ImageDataset data(random_images(8, {3, 20, 24}), every_augmentation());
  const auto batch = [&](uint64_t seed, int64_t epoch) {
    return data.assemble({.indices = first_indices(8), .seed = seed, .epoch = epoch}).data;
  };
  EXPECT_TRUE(torch::equal(batch(1, 2), batch(1, 2)));
  EXPECT_FALSE(torch::equal(batch(1, 2), batch(1, 3)));
  EXPECT_FALSE(torch::equal(batch(1, 2), batch(2, 2)));
}

TEST(ImageTransforms, have_no_randomness_in_validation) {
  const ImageTransforms t = without_augmentation(parse_transforms("random-resized-crop:224,flip,jitter,mixup", {}));
  EXPECT_EQ(t.crop, Crop::kCentre);
  EXPECT_EQ(t.shorter_edge, 256);
  SampleRandom random(1, 1);
  const Placement placement = draw_placement(t, {3, 512, 1024}, random);
  EXPECT_DOUBLE_EQ(placement.box.height, 448);
  EXPECT_DOUBLE_EQ(placement.box.left, 288);
  EXPECT_FALSE(placement.flip);
  EXPECT_FALSE(t.soft_target());
}

TEST(ImageTransforms, refuse_contradictions) {
  const auto refusal = [](const std::string& text) {
    return message_of<UsageError>([&] { ImageDataset(random_images(2, {3, 8, 8}), parse_transforms(text, {})); });
  };
  EXPECT_TRUE(contains(refusal("crup:4"), "--augment does not know 'crup:4'"));
  EXPECT_TRUE(contains(refusal("crop:x"), "'x' is not a number"));
  EXPECT_TRUE(contains(refusal("resize"), "it needs a size"));
  EXPECT_TRUE(contains(refusal("normalise:0.5+0.5:1"), "mean and deviation need 1 or 3 values"));
  EXPECT_TRUE(contains(refusal("mixup:-1"), "jitter or mixup is negative"));
}

TEST(MemoryImages, refuses_labels_that_do_not_fit_the_images) {
  const auto images = torch::zeros({3, 4, 4}, torch::kUInt8);
  const auto refusal = [&](const torch::Tensor& labels) {
    return message_of<DataError>([&] { MemoryImages("x", images, labels, 5, "x.bin"); });
  };
  EXPECT_TRUE(contains(refusal(torch::tensor({1, 2})), "3 images, but labels of shape [2]"));
  EXPECT_TRUE(contains(refusal(torch::tensor({1, 5, 2})), "label 5 of sample 1 is not in 0..4"));
  EXPECT_TRUE(contains(refusal(torch::tensor({1, -1, 2})), "label -1 of sample 1"));
  EXPECT_TRUE(contains(refusal(torch::tensor({1.F, 1.F, 2.F})), "labels of type float"));
}

}  // namespace
}  // namespace lockstep
